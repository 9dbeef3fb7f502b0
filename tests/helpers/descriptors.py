"""What descriptors this process has open."""

from __future__ import annotations

import os

# Of multiprocessing's helpers; made with the device and its default arenas.
OTHERS = ("pipe:", "socket:", "/memfd:gpumem-device")


def open_descriptors(others: tuple[str, ...] = OTHERS) -> dict[int, str]:
    """Return what each of this process's descriptors is, but for those that others open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own
    return {number: link for number, link in found.items() if not link.startswith(others)}

"""How fast pinned host memory is made: an arena's region against one cuMemHostAlloc.

    python -m bench.pinned [--device cuda:0] [--gib 4] [--repeats 7] [--json]

The memory of the machine is touched beforehand, since a page that a virtual machine never had
costs its host too. Both sides alternate, and so does their order; figures are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from typing import Any

import gpumem
from gpumem._testing.driver import driver_entry_names, table_and_context_of

MIB = 1 << 20
FLAGS = 1 | 2  # portable, mapped into the device


class HostAlloc:
    """cuMemHostAlloc and cuMemFreeHost of the device's own table, called as from C."""

    def __init__(self, device: str) -> None:
        self.place = gpumem.Device(device)._open()
        word = ctypes.sizeof(ctypes.c_void_p)
        table, self.context = table_and_context_of(self.place)
        names = [name for name, _ in driver_entry_names()]

        def entry(name: str, *types: Any) -> Any:
            address = ctypes.c_void_p.from_address(table + names.index(name) * word).value
            return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address or 0)

        self.allocate = entry("cuMemHostAlloc", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self.free = entry("cuMemFreeHost", ctypes.c_void_p)
        assert entry("cuCtxSetCurrent", ctypes.c_void_p)(self.context) == 0

    def seconds(self, nbytes: int) -> tuple[float, float]:
        """Return the time to allocate `nbytes`, and to free them."""
        pointer = ctypes.c_void_p()
        begin = time.perf_counter()
        assert self.allocate(ctypes.byref(pointer), nbytes, FLAGS) == 0
        made = time.perf_counter()
        assert pointer.value
        touch(pointer.value, nbytes)
        ready = time.perf_counter()
        assert self.free(pointer) == 0
        return made - begin, time.perf_counter() - ready


def arena_seconds(device: str, nbytes: int) -> tuple[float, float]:
    """Return the same of a new arena's first region."""
    config = {"extend_strategy": "same_as_requested"}
    with gpumem.Arena(f"{device}/host_accessible", config) as arena:
        begin = time.perf_counter()
        buffer = arena.allocate(nbytes)
        made = time.perf_counter()
        touch(buffer.ptr, nbytes)
        buffer.close()
        ready = time.perf_counter()
        arena.shrink()
        return made - begin, time.perf_counter() - ready


def touch(address: int, nbytes: int) -> None:
    """See that the memory is there, at both ends."""
    ctypes.memset(address, 1, 1)
    ctypes.memset(address + nbytes - 1, 1, 1)


def warm_machine(nbytes: int) -> None:
    """Touch as much memory as the largest measurement takes, twice over."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for offset in range(0, nbytes, mmap.PAGESIZE):
            pages[offset] = 1


def measure(device: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Alternate both sides; return medians and the median ratio within a repeat."""
    plain = HostAlloc(device)
    sides = {"cuMemHostAlloc": plain.seconds, "arena": lambda n: arena_seconds(device, n)}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name in sorted(sides, reverse=bool(repeat % 2)):
            result = sides[name](nbytes)
            if repeat:  # the first is a rehearsal
                samples[name].append(result)
    pairs = list(zip(samples["cuMemHostAlloc"], samples["arena"], strict=True))
    return {
        "nbytes": nbytes,
        "repeats": repeats,
        "make_seconds": {name: statistics.median(a for a, _ in s) for name, s in samples.items()},
        "free_seconds": {name: statistics.median(b for _, b in s) for name, s in samples.items()},
        "make_ratio": statistics.median(a[0] / b[0] for a, b in pairs),
        "make_ratio_range": [
            min(a[0] / b[0] for a, b in pairs),
            max(a[0] / b[0] for a, b in pairs),
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the largest region")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    largest = int(asked.gib * 1024) * MIB
    warm_machine(2 * largest)
    sizes = [MIB, 2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, largest]
    report = {
        "device": gpumem.Device(asked.device).name,
        "cpus": len(os.sched_getaffinity(0)),
        "rows": [
            measure(asked.device, size, asked.repeats)
            for size in sorted(set(sizes))
            if size <= largest
        ],
    }
    if asked.json:
        print(json.dumps(report, indent=1))
        return 0
    print(f"{report['device']}, {report['cpus']} CPUs; milliseconds, medians of {asked.repeats}")
    print(f"{'MiB':>6} {'cuMemHostAlloc':>15} {'arena':>9} {'ratio':>6} {'freed':>9} {'freed':>9}")
    for row in report["rows"]:
        made, freed = row["make_seconds"], row["free_seconds"]
        print(
            f"{row['nbytes'] // MIB:6} {made['cuMemHostAlloc'] * 1e3:15.2f} "
            f"{made['arena'] * 1e3:9.2f} {row['make_ratio']:6.2f} "
            f"{freed['cuMemHostAlloc'] * 1e3:9.2f} {freed['arena'] * 1e3:9.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

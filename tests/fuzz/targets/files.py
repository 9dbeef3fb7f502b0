"""Files and counts that targets share."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory(
    prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
)


def folder() -> Path:
    """A folder of this process."""
    return Path(_FOLDER.name)


def written(data: bytes, name: str = "input") -> Path:
    """Write a file of this name."""
    path = folder() / name
    path.write_bytes(data)
    return path


def alive() -> dict[str, int]:
    """What the host device holds, once everything that is retired is released."""
    from gpumem._testing import host_device
    from gpumem._testing.arenas import release_retired
    from tests.helpers.quiesce import held_by_kind

    gc.collect()
    release_retired()
    return held_by_kind() | {"bytes": host_device.used(0)}

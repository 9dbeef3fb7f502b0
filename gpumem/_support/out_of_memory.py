"""Limits of the process for which the kernel refuses memory, although memory is there.

Errors name them. All modules are imported beforehand: without a descriptor none can be imported.
Some mappings are kept for the objects of an error: without one Python gets no memory for them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource

from gpumem._support.sizes import format_size

_NEAR = 256  # mappings; a refused request has undone as many steps at most
_KEPT = 4  # mappings; shared ones, which never merge, and without memory, as nothing is written
_PIECE = 4096  # bytes of a file that are read at a time
_ALIGNMENT = 64 << 20  # bytes that a request maps in addition to its own and to tables, at most
_PAGE = 2 << 20  # bytes of the smallest file that is the memory of blocks
_ADDRESSES = 1 << 47  # bytes that Linux has for a process
_LIMITS = (
    (resource.RLIMIT_AS, b"VmSize:", "address space", "RLIMIT_AS", "-v"),
    (resource.RLIMIT_DATA, b"VmData:", "private writable memory", "RLIMIT_DATA", "-d"),
    (resource.RLIMIT_MEMLOCK, b"VmLck:", "locked memory", "RLIMIT_MEMLOCK", "-l"),
)


class _KeptMappings:
    """A few mappings that are released while an error is made, and kept again afterwards."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []
        self.__exit__()

    def __enter__(self) -> None:
        self._kept.clear()

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            while len(self._kept) < _KEPT:
                self._kept.append(mmap.mmap(-1, mmap.PAGESIZE))


kept_mappings = _KeptMappings()


def lacking(nbytes: int) -> tuple[str, str] | None:
    """Return what the process has no more of, and the remedy; None if no limit is reached.

    Parameters
    ----------
    nbytes : int
        Bytes that were refused.

    Examples
    --------
    >>> lacking(1 << 20) is None
    True
    """
    return _files(nbytes) or _bytes(nbytes) or _mappings()


def _files(nbytes: int) -> tuple[str, str] | None:
    # Memory of the host device, and shareable memory, is files.
    try:
        number = os.memfd_create("gpumem")
        try:
            os.ftruncate(number, max(nbytes, _PAGE))  # takes no memory
        finally:
            os.close(number)
    except OSError as error:
        if error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            return (
                "room in files",
                f"RLIMIT_FSIZE allows files of {format_size(limit)}, also for memory that is a "
                "file: raise the limit (ulimit -f)",
            )
        if error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                "file descriptors",
                f"too many open files: RLIMIT_NOFILE allows {limit:,} descriptors: free shareable "
                "memory, close files, or raise the limit (ulimit -n)",
            )
        if error.errno == errno.ENFILE:
            return (
                "file descriptors",
                "too many open files in the system: close files, or raise fs.file-max",
            )
    return None


def _bytes(nbytes: int) -> tuple[str, str] | None:
    sizes = dict(line.split()[:2] for line in _lines("/proc/self/status") if b" kB" in line)
    for number, field, words, name, option in _LIMITS:
        limit = resource.getrlimit(number)[0]
        used = int(sizes.get(field, 0)) << 10
        if number == resource.RLIMIT_AS and used + used // 16 >= _ADDRESSES:
            return (
                words,
                f"{format_size(used)} are reserved or in use, nearly all that a process can have: "
                "close arenas, or release reserved addresses",
            )
        # Each table and range of an arena takes a sixteenth of the addresses (include/reserved.h);
        # a refused request has released up to three of them.
        tables = limit // 4 if number == resource.RLIMIT_AS else limit // 16
        free = limit - tables - used
        locks = number == resource.RLIMIT_MEMLOCK and not used  # nothing of the process is locked
        if limit != resource.RLIM_INFINITY and not locks and free < nbytes + _ALIGNMENT:
            return (
                words,
                f"{format_size(used)} of the {format_size(limit)} that {name} allows are in use, "
                f"reserved addresses included: free memory, or raise the limit (ulimit {option})",
            )
    return None


def _mappings() -> tuple[str, str] | None:
    limit = int(next(iter(_lines("/proc/sys/vm/max_map_count")), 0))
    count = _count_of_lines("/proc/self/maps") if limit else 0
    if count + _NEAR <= limit:
        return None
    return (
        "memory mappings",
        f"the process has {count:,} of the {limit:,} mappings that vm.max_map_count allows: "
        "free memory, or raise that limit (sysctl vm.max_map_count)",
    )


def _lines(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.readlines()
    except OSError:
        return []


def _count_of_lines(path: str) -> int:
    """Count the lines in pieces: without a mapping, Python has no memory for all of them."""
    piece = bytearray(_PIECE)
    try:
        with open(path, "rb", buffering=0) as file:
            return sum(
                piece.count(b"\n", 0, size) for size in iter(lambda: file.readinto(piece), 0)
            )
    except OSError:
        return 0

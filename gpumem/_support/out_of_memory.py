"""Limits of the process for which the kernel refuses memory, although memory is there.

Errors name them. All modules are imported beforehand: without a descriptor none can be imported.
"""

from __future__ import annotations

import errno
import os
import resource

from gpumem._support.sizes import format_size

_NEAR = 256  # mappings; a refused request has undone as many steps at most
_ALIGNMENT = 64 << 20  # bytes that a request maps in addition to its own and to tables, at most
_LIMITS = (
    (resource.RLIMIT_AS, b"VmSize:", "address space", "RLIMIT_AS", "-v"),
    (resource.RLIMIT_DATA, b"VmData:", "private writable memory", "RLIMIT_DATA", "-d"),
    (resource.RLIMIT_MEMLOCK, b"VmLck:", "locked memory", "RLIMIT_MEMLOCK", "-l"),
)


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
    return _descriptors() or _bytes(nbytes) or _mappings()


def _descriptors() -> tuple[str, str] | None:
    try:
        os.close(os.memfd_create("gpumem"))
    except OSError as error:
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
        # Tables of an arena take a sixteenth of the addresses (include/reserved.h).
        free = limit - limit // 16 - used
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
    count = len(_lines("/proc/self/maps")) if limit else 0
    if count + _NEAR <= limit or not count:
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

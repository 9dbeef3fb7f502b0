"""Counters of running processes, read from the pages that they publish; see `gpumem._live`."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import time
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumem import _live
from gpumem._support.closing import Closable
from gpumem._support.files import is_at
from gpumem._support.forks import ForkLock
from gpumem.errors import GpumemError, NotPublishedError

FOLDER = Path(_live.FOLDER)
_VERSION = _live.VERSION
_MIN_PERIOD, _MAX_PERIOD = 0.001, 3600.0  # seconds

_NAME = re.compile(r"gpumem-(\d+)-(\d+)", re.ASCII)  # user, process
_UNLIMITED = 1 << 63
_READS = 5  # of one page; a read fails only if two updates fall into it
# Little-endian, as in `gpumem._live`.
_HEADER = struct.Struct("<8sIIIIIIQ")
_COPY = struct.Struct("<IIQQQIIII")
_RESOURCE = struct.Struct(f"<QQQ32s24s64s{_live.COUNTERS_FORMAT}")
_BUDGET = struct.Struct("<QQ64s4Q")


@dataclass(frozen=True)
class LiveResource:
    """A resource on a page; sizes in bytes.

    Attributes
    ----------
    id : int
        Number of the resource in its process, never used again.
    name, memory, kind : str
        Cut to 63, 31 and 23 bytes; `kind` is "arena", "graph pool", "user", or a class's name.
    budget : int or None
        `LiveBudget.id` of the budget that it charges.
    counters : Mapping of str to int
        Named as in `Stats`: limit (0: none), in_use, requested_in_use, reserved, max_in_use,
        max_reserved, num_allocs, num_frees, num_reserves, num_extensions, num_shrinkages,
        max_alloc_size, pages_moved, driver_calls, asleep_bytes. For a driver's pool `reserved`
        is the size of its blocks.
    source : int or None
        `LiveResource.id` of the resource that the memory of an arena comes from (`Arena` with
        `source`), below adaptors: this memory is in use there.

    Examples
    --------
    >>> from gpumem.observe import LiveResource
    >>> counters = {"in_use": 0, "reserved": 4096}
    >>> resource = LiveResource(7, "cache", "host:0", "arena", None, counters)
    >>> resource.counters["reserved"] - resource.counters["in_use"]      # idle
    4096
    """

    id: int
    name: str
    memory: str
    kind: str
    budget: int | None
    counters: Mapping[str, int]
    source: int | None = None


@dataclass(frozen=True)
class LiveBudget:
    """A budget on a page; in bytes, and None for no limit.

    Attributes
    ----------
    id : int
        Number of the budget in its process, never used again.
    name : str
        Cut to 63 bytes.
    parent : int or None
        `id` of the level above.
    used, peak : int
        Bytes charged now, and their maximum so far.
    limit, soft : int or None

    Examples
    --------
    >>> from gpumem.observe import LiveBudget
    >>> budget = LiveBudget(3, "job", None, used=900, limit=1000, soft=800, peak=950)
    >>> budget.soft is not None and budget.used > budget.soft       # under pressure
    True
    """

    id: int
    name: str
    parent: int | None
    used: int
    limit: int | None
    soft: int | None
    peak: int


@dataclass(frozen=True)
class LivePage:
    """The resources of a process at one moment.

    Attributes
    ----------
    process : int
        Id of the process.
    alive : bool
        False: the process has ended without removing its page. These are its last numbers, and
        the page is removed now.
    time : float
        When the numbers were taken, in seconds since 1970.
    clock : float
        The same in seconds of the machine's monotonic clock, for rates.
    period : float
        Seconds between two updates.
    resources : tuple of LiveResource
        Those that are not closed, the newest first.
    budgets : tuple of LiveBudget
        The newest first.
    left_out : int
        Resources and budgets that do not fit in the page.

    Examples
    --------
    >>> import os, gpumem.observe
    >>> with gpumem.observe.publish():
    ...     page = gpumem.observe.LivePage.of_process(os.getpid())
    >>> page.process == os.getpid(), page.alive
    (True, True)
    """

    process: int
    alive: bool
    time: float
    clock: float
    period: float
    resources: tuple[LiveResource, ...]
    budgets: tuple[LiveBudget, ...]
    left_out: int

    @classmethod
    def of_process(cls, process: int) -> LivePage:
        """Read the page of a process, without touching the process.

        Parameters
        ----------
        process : int
            Id of the process.

        Returns
        -------
        LivePage
            `alive` is False if the process has ended; its page is then removed.

        Raises
        ------
        NotPublishedError
            The process publishes nothing, does not exist, or belongs to another user.
        GpumemError
            The page is damaged, or was written by another version of gpumem.

        Examples
        --------
        >>> import gpumem.observe
        >>> try:
        ...     gpumem.observe.LivePage.of_process(2**31)
        ... except gpumem.errors.NotPublishedError as error:
        ...     print(error)
        process 2147483648 does not exist
        """
        path = FOLDER / f"gpumem-{os.getuid()}-{process}"
        try:
            # Another user may have made a pipe of this name; opening it must not wait.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise NotPublishedError(_why_not(process)) from error
        try:
            header = _header(descriptor, path)
            alive = not _is_deserted(descriptor)
            if not alive and is_at(descriptor, path):
                path.unlink(missing_ok=True)
            start, stride, period = _layout(header, os.fstat(descriptor).st_size, path)
            copy = _newest_copy(descriptor, path, start, stride)
            return decode_copy(copy, process, alive, period)
        finally:
            os.close(descriptor)

    @classmethod
    def of_all(cls) -> tuple[LivePage, ...]:
        """Read the page of every process of this user, in the order of process ids.

        Pages of processes that have ended are returned this once, and removed.

        Returns
        -------
        tuple of LivePage
            Empty if there is no /dev/shm.

        Warns
        -----
        RuntimeWarning
            A page is left out, because it is damaged or of another version of gpumem.

        Examples
        --------
        >>> import gpumem.observe
        >>> pages = gpumem.observe.LivePage.of_all()
        >>> held = sum(page.total("reserved") for page in pages)
        """
        mine = str(os.getuid())
        names = os.listdir(FOLDER) if FOLDER.is_dir() else []
        found = (_NAME.fullmatch(name) for name in names)
        numbers = sorted(int(match[2]) for match in found if match and match[1] == mine)
        pages = []
        for number in numbers:
            try:
                pages.append(cls.of_process(number))
            except NotPublishedError:  # it has just ended
                continue
            except GpumemError as error:
                warnings.warn(f"a process is left out: {error}", RuntimeWarning, stacklevel=2)
        return tuple(pages)

    @property
    def age(self) -> float:
        """Seconds since the last update; more than `period` only if the process does not run.

        The numbers of a process that is stopped or gets no processor do not change either.
        """
        return time.monotonic() - self.clock

    def total(self, counter: str, memory: str | None = None) -> int:
        """Sum a counter of all resources, or of those of one memory.

        Memory that an arena has from another resource of the page counts once in ``in_use``,
        ``requested_in_use`` and ``reserved``: at the arena. Its free part is not in use.
        """
        ids = {one.id for one in self.resources}
        counts_bytes = counter in ("in_use", "requested_in_use", "reserved")
        return sum(
            one.counters[counter]
            - (one.counters["reserved"] if counts_bytes and one.source in ids else 0)
            for one in self.resources
            if memory is None or one.memory == memory
        )


# ---- this process --------------------------------------------------------------------------------


class Publication(Closable):
    """The counters of this process in shared memory, as `publish` returns them.

    A context manager: leaving it closes it. The file lives until `close`, or until the process
    exits; dropping this object changes nothing.

    Attributes
    ----------
    closed : bool
        Whether `close` was called.

    Examples
    --------
    >>> import gpumem.observe
    >>> with gpumem.observe.publish() as publication:
    ...     publication.path.exists()
    True
    >>> publication.path.exists(), publication.closed
    (False, True)
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def close(self) -> None:
        """Remove the file and stop refreshing it. Idempotent.

        `publish` returns one object to all callers, so this ends it for all of them. A later
        `publish` makes a new file.
        """
        global _publication
        with _lock:
            if self._closed:
                return
            _live.stop()
            self._closed = True
            _publication = None

    def __repr__(self) -> str:
        return f"<gpumem.observe.Publication {self._path}{', closed' if self._closed else ''}>"


_lock = ForkLock()
_publication: Publication | None = None


def publish(*, period: float = _live.PERIOD) -> Publication:
    """Let ``gpumem top`` see this process's resources.

    Writes their counters into a file in shared memory that only this user can read. A separate
    thread updates the file. It needs neither the interpreter lock nor a lock of an allocator, so
    the numbers stay current while Python is blocked. Allocations do not become slower.

    GPUMEM_TOP=1 in the environment does the same, starting with the first resource. In a forked
    child it starts again with the child's first resource. It ends at exit, or with
    `Publication.close`. The file has room for the 256 newest resources and the 128 newest budgets,
    and counts the others.

    Parameters
    ----------
    period : float
        Seconds between two updates, 0.001 to 3600. A later call may change it.

    Returns
    -------
    Publication
        The same object until it is closed.

    Raises
    ------
    TypeError, ValueError
        Invalid `period`.
    OSError
        The file or the thread cannot be created, for example because shared memory is full or
        /dev/shm does not exist.

    Examples
    --------
    >>> import gpumem, gpumem.observe, os
    >>> publication = gpumem.observe.publish()
    >>> arena = gpumem.Arena("host", name="weights")
    >>> buffer = arena.allocate(4096)
    >>> import time; time.sleep(0.5)
    >>> page = gpumem.observe.LivePage.of_process(os.getpid())
    >>> [r.counters["in_use"] for r in page.resources if r.name == "weights"]
    [4096]
    >>> publication.close()
    """
    global _publication
    if isinstance(period, bool) or not isinstance(period, int | float):
        raise TypeError(f"period must be a number of seconds, not {type(period).__name__}")
    if not _MIN_PERIOD <= period <= _MAX_PERIOD:
        accepted = f"{_MIN_PERIOD} to {_MAX_PERIOD} seconds"
        raise ValueError(f"invalid period = {period!r}: expected {accepted}")
    with _lock:
        path = Path(_live.start(period))
        if _publication is None:
            _publication = Publication(path)
        _publication._path = path  # a forked child's file has another name
        return _publication


# ---- every process -------------------------------------------------------------------------------


def _why_not(process: int) -> str:
    others = [path for path in FOLDER.glob(f"gpumem-*-{process}") if _NAME.fullmatch(path.name)]
    if others:
        return f"process {process} is another user's: only that user can watch it"
    if not Path("/proc", str(process)).exists():
        return f"process {process} does not exist"
    return (
        f"process {process} publishes nothing: start it with GPUMEM_TOP=1, "
        "or call gpumem.observe.publish() in it"
    )


def _is_deserted(descriptor: int) -> bool:
    """Return whether the process of a page has ended: it holds a lock as long as it lives."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- reading -------------------------------------------------------------------------------------


def _header(descriptor: int, path: Path) -> bytes:
    file = os.fstat(descriptor)
    if file.st_uid != os.getuid():
        raise NotPublishedError(f"{path} belongs to another user")
    header = os.pread(descriptor, _HEADER.size, 0) if stat.S_ISREG(file.st_mode) else b""
    if len(header) < _HEADER.size or not header.startswith(b"gpumemTP"):
        raise GpumemError(f"{path} is not a page of gpumem")
    return header


def _layout(header: bytes, file_bytes: int, path: Path) -> tuple[int, int, float]:
    """Return where the copies begin, bytes from one to the next, and seconds between updates."""
    _, version, start, stride, resource_bytes, budget_bytes, period_ms, _ = _HEADER.unpack(header)
    if version != _VERSION:
        raise GpumemError(f"{path} has version {version}: this gpumem reads version {_VERSION}")
    if (resource_bytes, budget_bytes) != (_RESOURCE.size, _BUDGET.size):
        raise GpumemError(
            f"{path} is of another gpumem: its records have {resource_bytes} and {budget_bytes} "
            f"bytes, this gpumem reads {_RESOURCE.size} and {_BUDGET.size}"
        )
    if stride > file_bytes:
        raise GpumemError(f"{path} is damaged: copies of {stride} bytes in a file of {file_bytes}")
    return start, stride, period_ms / 1000


def _newest_copy(descriptor: int, path: Path, start: int, stride: int) -> bytes:
    for _ in range(_READS):
        copies = [_whole_copy(os.pread(descriptor, stride, start + i * stride)) for i in (0, 1)]
        newest = max(copies, key=_number)
        if newest:
            return newest
    raise GpumemError(f"{path} is damaged: neither copy is whole, or has the right CRC")


def _whole_copy(data: bytes) -> bytes:
    """Cut a copy after its last record; empty if it is not whole."""
    if len(data) < _COPY.size:
        return b""
    crc, length, _, _, _, resources, budgets, _, _ = _COPY.unpack_from(data)
    whole = _COPY.size + resources * _RESOURCE.size + budgets * _BUDGET.size
    if not whole == length <= len(data) or zlib.crc32(data[4:length]) != crc:
        return b""
    return data[:length]


def _number(copy: bytes) -> int:
    return int(_COPY.unpack_from(copy)[2]) if copy else 0


def decode_copy(copy: bytes, process: int, alive: bool, period: float) -> LivePage:
    """Read a copy that is known to be whole."""
    _, _, _, time_ns, clock_ns, count, levels, unseen, unseen_levels = _COPY.unpack_from(copy)
    begin = _COPY.size + count * _RESOURCE.size
    end = begin + levels * _BUDGET.size
    resources = tuple(map(_resource, _RESOURCE.iter_unpack(copy[_COPY.size : begin])))
    budgets = tuple(map(_budget, _BUDGET.iter_unpack(copy[begin:end])))
    left_out = unseen + unseen_levels
    seconds, clock = time_ns / 1e9, clock_ns / 1e9
    return LivePage(process, alive, seconds, clock, period, resources, budgets, left_out)


def _resource(words: tuple[Any, ...]) -> LiveResource:
    number, budget, source, *texts, name = words[:6]
    memory, kind = map(_text, texts)
    counters = dict(zip(_live.COUNTERS, words[6:], strict=True))
    return LiveResource(number, _text(name), memory, kind, budget or None, counters, source or None)


def _budget(words: tuple[Any, ...]) -> LiveBudget:
    number, parent, name, used, *limits, peak = words
    limit, soft = (None if each == _UNLIMITED else each for each in limits)
    return LiveBudget(number, _text(name), parent or None, used, limit, soft, peak)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "ignore")

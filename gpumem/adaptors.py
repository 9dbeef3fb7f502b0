"""Adaptors: resources around other resources, in any nesting.

Each hands out its upstream's blocks under its own name: a buffer's `resource` is the outermost
adaptor, and its free goes through all of them, also when a view of it is dropped on a thread that
does not run Python. An adaptor refers to its upstream and does not own it: closing the adaptor
leaves the upstream open, and the upstream cannot be closed while blocks of the adaptor live.

>>> import gpumem
>>> tracked = gpumem.track(gpumem.limit(gpumem.Arena("host"), 1 << 20))
>>> with tracked.allocate(1000) as buffer:
...     buffer.resource is tracked, tracked.counts().current_bytes
(True, 1000)
"""

from __future__ import annotations

import collections
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias, TypeGuard

from gpumem._adaptor import Adaptor, handle_or_zero, report, serve_from
from gpumem._buffer import Buffer, MemoryResource
from gpumem.stats import ShrinkReport, Stats

__all__ = [
    "FailureAdaptor",
    "FallbackAdaptor",
    "LimitAdaptor",
    "LogAdaptor",
    "MemoryEvent",
    "Outstanding",
    "TrackAdaptor",
    "TrackCounts",
    "fallback",
    "limit",
    "log",
    "on_failure",
    "track",
]

_MAX_LIMIT = (1 << 63) - 1


# ---- limit ---------------------------------------------------------------------------------------


class LimitAdaptor(Adaptor):
    """A resource with a limit of its own; see `limit`."""

    def __init__(self, resource: MemoryResource, nbytes: int, *, name: str | None = None) -> None:
        if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
            raise TypeError(f"nbytes must be an integer, not {type(nbytes).__name__}")
        number = nbytes.__index__()
        if not 0 <= number <= _MAX_LIMIT:
            raise ValueError(f"nbytes = {number} is not accepted: it takes 0 to {_MAX_LIMIT}")
        super().__init__((resource,), name=name, limit=number)
        self._limit = number

    @property
    def limit(self) -> int:
        """Bytes that may be handed out at a time, as they are asked for."""
        return self._limit

    @property
    def used(self) -> int:
        """Bytes handed out now, as they were asked for."""
        return self._counts()[0]

    @property
    def free(self) -> int:
        """Bytes that may still be handed out."""
        return self._limit - self.used


def limit(resource: MemoryResource, nbytes: int, *, name: str | None = None) -> LimitAdaptor:
    """Let a resource hand out so many bytes at a time, and no more.

    Bytes count as they are asked for, before the upstream is: whatever threads do, the limit is
    never passed, and a request that the upstream refuses counts for nothing.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    nbytes : int
        The limit, 0 to 2**63 - 1.
    name : str, optional
        For people; the upstream's by default.

    Returns
    -------
    LimitAdaptor
        With `limit`, `used` and `free`. Beyond the limit its `allocate` raises OutOfMemoryError.

    Raises
    ------
    TypeError, ValueError
        `resource` is no MemoryResource, or `nbytes` no such number.

    Examples
    --------
    >>> import gpumem
    >>> small = gpumem.limit(gpumem.Arena("host"), 1 << 20)
    >>> with small.allocate(1 << 20):
    ...     small.free
    0
    """
    return LimitAdaptor(resource, nbytes, name=name)


# ---- log -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryEvent:
    """One event of a logged resource.

    Attributes
    ----------
    action : {"allocate", "free", "failure"}
        A block was handed out, or came back, or could not be handed out.
    ptr : int
        Address of the block; 0 after a failure and of an empty block.
    nbytes : int
        Bytes asked for.
    stream : int
        Handle of the stream it was allocated for, or went back on; 0 and 1 are the legacy default
        stream.
    time : int
        Nanoseconds since 1970.
    thread : int
        Identity of the thread that did it, as `threading.get_ident` has it; a view may be dropped
        on a thread that Python does not know.
    memory : str
        Where the block lives, such as ``"cuda:0"``.
    persistent : bool
        It was asked for with ``allocate_persistent``. False of a free.
    error : str
        Of a failure: the exception.
    """

    action: str
    ptr: int
    nbytes: int
    stream: int
    time: int
    thread: int
    memory: str
    persistent: bool = False
    error: str = ""


class _TextFile(Protocol):
    def write(self, text: str, /) -> object: ...


Sink: TypeAlias = Callable[[MemoryEvent], object] | _TextFile | logging.Logger

_CSV_HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"
_CSV_ACTIONS = {"allocate": "allocate", "free": "free", "failure": "allocate failure"}


class LogAdaptor(Adaptor):
    """A resource that tells a sink of every allocation and free; see `log`."""

    def __init__(self, resource: MemoryResource, sink: Sink, *, name: str | None = None) -> None:
        self._sink = _function_of(sink)
        self._events: collections.deque[MemoryEvent] = collections.deque()
        self._telling: set[int] = set()
        super().__init__((resource,), name=name, tells=True)
        if _is_file(sink):
            sink.write(_CSV_HEADER)

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        try:
            buffer = serve_from(self.upstreams[0], nbytes, stream, options, persistent)
        except BaseException as error:
            handle = handle_or_zero(self, stream)
            self._tell("failure", 0, nbytes, handle, persistent, f"{type(error).__name__}: {error}")
            raise
        memory = str(buffer.memory)
        self._tell("allocate", buffer.ptr, nbytes, buffer.stream.ptr, persistent, memory=memory)
        return buffer

    def _taken_back(self, address: int, nbytes: int, stream: int, time: int, thread: int) -> None:
        memory = str(self.memory)
        self._put(MemoryEvent("free", address, nbytes, stream, time, thread, memory))

    def _tell(
        self,
        action: str,
        ptr: int,
        nbytes: int,
        stream: int,
        persistent: bool,
        error: str = "",
        memory: str | None = None,
    ) -> None:
        now, thread = time.time_ns(), threading.get_ident()
        where = str(self.memory) if memory is None else memory
        self._put(MemoryEvent(action, ptr, nbytes, stream, now, thread, where, persistent, error))

    def _put(self, event: MemoryEvent) -> None:
        """Hand events to the sink, oldest first; what comes up inside the sink follows it."""
        self._events.append(event)
        thread = threading.get_ident()
        if thread in self._telling:
            return
        self._telling.add(thread)
        try:
            while self._events:
                try:
                    event = self._events.popleft()
                except IndexError:  # another thread was faster
                    break
                try:
                    self._sink(event)
                except Exception as error:
                    report(error, self._sink)
        finally:
            self._telling.discard(thread)


def _is_file(sink: Sink) -> TypeGuard[_TextFile]:
    return hasattr(sink, "write")


def _function_of(sink: Sink) -> Callable[[MemoryEvent], object]:
    if isinstance(sink, logging.Logger):
        logger = sink

        def write_log(event: MemoryEvent) -> None:
            level = logging.WARNING if event.action == "failure" else logging.INFO
            logger.log(
                level,
                "%s %d bytes at %#x in %s on stream %#x%s",
                event.action,
                event.nbytes,
                event.ptr,
                event.memory,
                event.stream,
                f": {event.error}" if event.error else "",
                extra={"memory_event": event},
            )

        return write_log
    if _is_file(sink):
        file = sink

        def write_csv(event: MemoryEvent) -> None:
            seconds, rest = divmod(event.time // 1000, 1_000_000)
            file.write(
                f"{event.thread},{seconds}.{rest:06d},{_CSV_ACTIONS[event.action]},"
                f"{event.ptr:#x},{event.nbytes},{event.stream:#x}\n"
            )

        return write_csv
    if callable(sink):

        def call(event: MemoryEvent) -> None:
            sink(event)

        return call
    raise TypeError(f"sink {sink!r} is not accepted: it takes a callable, a file or a Logger")


def log(resource: MemoryResource, sink: Sink, *, name: str | None = None) -> LogAdaptor:
    """Tell a sink of every allocation, free and failure.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    sink : callable, file or logging.Logger
        A callable gets each `MemoryEvent`. A text file gets comma-separated lines as RMM's
        ``LoggingResourceAdaptor`` writes them, which ``gpumem replay`` reads. A Logger gets a
        record at INFO, of a failure at WARNING, with the event as its attribute ``memory_event``.
    name : str, optional
        For people; the upstream's by default.

    Returns
    -------
    LogAdaptor

    Raises
    ------
    TypeError
        `resource` is no MemoryResource, or `sink` none of the three.

    Notes
    -----
    A sink is called on the thread where the event happened, finalizers included; an event that
    comes up inside the sink itself is told right after. A view that is dropped on a thread without
    Python is told of later; its `time` is right. An exception of the sink is reported to
    ``sys.unraisablehook``: logging changes nothing.

    Examples
    --------
    >>> import gpumem
    >>> events = []
    >>> with gpumem.log(gpumem.Arena("host"), events.append).allocate(1000):
    ...     pass
    >>> [(event.action, event.nbytes) for event in events]
    [('allocate', 1000), ('free', 1000)]
    """
    return LogAdaptor(resource, sink, name=name)


# ---- on_failure ----------------------------------------------------------------------------------


class FailureAdaptor(Adaptor):
    """A resource that asks a callback before it gives up; see `on_failure`."""

    def __init__(
        self,
        resource: MemoryResource,
        callback: Callable[[int, int], bool],
        *,
        name: str | None = None,
    ) -> None:
        if not callable(callback):
            raise TypeError(f"callback {callback!r} is not callable")
        super().__init__((resource,), name=name)
        self._callback = callback

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        attempt = 0
        while True:
            try:
                return serve_from(self.upstreams[0], nbytes, stream, options, persistent)
            except MemoryError:
                attempt += 1
                again = self._callback(nbytes, attempt)
                if not isinstance(again, bool):
                    raise TypeError(
                        f"callback {self._callback!r} returned {again!r}: it returns True to try "
                        "again, False to give up"
                    ) from None
                if not again:
                    raise


def on_failure(
    resource: MemoryResource, callback: Callable[[int, int], bool], *, name: str | None = None
) -> FailureAdaptor:
    """Ask a callback, when there is no memory, whether to try again.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    callback : callable
        ``callback(nbytes, attempt) -> bool``: bytes asked for, and how often that failed now, from
        1. It may free buffers, shrink, spill. True: the upstream is asked again. False: its
        MemoryError is raised.
    name : str, optional
        For people; the upstream's by default.

    Returns
    -------
    FailureAdaptor

    Raises
    ------
    TypeError
        `resource` is no MemoryResource, or `callback` not callable. In `allocate`: `callback`
        returned something other than True or False; what it raises passes as it is.

    Examples
    --------
    >>> import gpumem
    >>> small = gpumem.limit(gpumem.Arena("host"), 1000)
    >>> cache = [small.allocate(600)]
    >>> spilling = gpumem.on_failure(small, lambda nbytes, attempt: bool(cache and [cache.pop()]))
    >>> spilling.allocate(600).nbytes
    600
    """
    return FailureAdaptor(resource, callback, name=name)


# ---- fallback ------------------------------------------------------------------------------------


class FallbackAdaptor(Adaptor):
    """Several resources of one device, asked one after another; see `fallback`."""

    def __init__(self, *resources: MemoryResource, name: str | None = None) -> None:
        if len(resources) < 2:
            raise TypeError(f"fallback takes two or more resources, not {len(resources)}")
        super().__init__(resources, name=name)
        for number, resource in enumerate(resources):
            if resource.memory.device != self.memory.device:
                raise ValueError(
                    f"{resource!r} is of {resource.memory.device}: a fallback takes resources of "
                    f"one device, here of {self.memory.device}"
                )
            if any(resource is other for other in resources[:number]):
                raise ValueError(f"{resource!r} is given twice")
        self._served = [0] * len(resources)
        self._lock = threading.Lock()

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        refusals = []
        for number, upstream in enumerate(self.upstreams):
            try:
                buffer = serve_from(upstream, nbytes, stream, options, persistent)
            except MemoryError as error:
                refusals.append(f"before that, {upstream!r}: {error}")
                if upstream is not self.upstreams[-1]:
                    continue
                for refusal in refusals[:-1]:
                    error.add_note(refusal)
                raise
            with self._lock:
                self._served[number] += 1
            return buffer
        raise AssertionError("unreachable")

    def _note(self, buffer: Buffer, persistent: bool) -> MemoryResource:
        return buffer.resource

    def served_by(self, buffer: Buffer) -> MemoryResource:
        """Return which of the resources a live buffer came from.

        Raises
        ------
        ValueError
            The buffer is not one of this adaptor's.
        ClosedError
            It is closed.
        """
        resource: MemoryResource = self._note_of(buffer)
        return resource

    @property
    def served(self) -> tuple[int, ...]:
        """Blocks that each of the resources has handed out here since the start."""
        return tuple(self._served)

    @property
    def is_arena(self) -> bool:
        """Whether any of the resources sub-allocates and can be shrunk."""
        return any(upstream.is_arena for upstream in self.upstreams)

    def shrink(self) -> ShrinkReport:
        """Shrink every resource; the report has what all of them gave back and kept."""
        reports = [upstream.shrink() for upstream in self.upstreams]
        return ShrinkReport(
            sum(report.released_bytes for report in reports),
            tuple(kept for report in reports for kept in report.kept),
        )

    def stats(self) -> Stats:
        """Return the sums of the resources' counters.

        The limit is 0 if one of them has none; peaks are sums of peaks, so an upper bound; the
        largest blocks are those of the resource that has the largest.
        """
        parts = [upstream.stats() for upstream in self.upstreams]
        sums = {
            each.name: sum(getattr(part, each.name) for part in parts) for each in fields(Stats)
        }
        if any(part.limit == 0 for part in parts):
            sums["limit"] = 0
        for largest in ("max_alloc_size", "largest_free"):
            sums[largest] = max(getattr(part, largest) for part in parts)
        return Stats(**sums)


def fallback(
    first: MemoryResource,
    second: MemoryResource,
    *more: MemoryResource,
    name: str | None = None,
) -> FallbackAdaptor:
    """Ask one resource after another until one has the memory.

    Such as a GPU's own memory, then pinned memory of the same GPU, then managed memory. A buffer's
    `memory` says where it really lives, so what comes from pinned memory has NumPy views.

    Parameters
    ----------
    first, second, *more : MemoryResource
        Of one device, in the order in which they are asked. A resource is passed over when it
        raises MemoryError; every other exception passes as it is.
    name : str, optional
        For people; the first resource's by default.

    Returns
    -------
    FallbackAdaptor
        Its `memory` is the first resource's; `served_by` and `served` say which one served. If
        none has the memory, the last one's error is raised, the others' are its notes.

    Raises
    ------
    TypeError
        A resource is no MemoryResource.
    ValueError
        The resources are not of one device, or one is given twice.

    Examples
    --------
    >>> import gpumem
    >>> device = gpumem.limit(gpumem.Arena("host"), 1 << 20)
    >>> pinned = gpumem.Arena("host/host_accessible")
    >>> both = gpumem.fallback(device, pinned)
    >>> str(both.allocate(2 << 20).memory)
    'host:0/host_accessible'
    """
    return FallbackAdaptor(first, second, *more, name=name)


# ---- track ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrackCounts:
    """What a tracked resource has handed out; bytes as they were asked for.

    Attributes
    ----------
    current_bytes, current_blocks : int
        Handed out now.
    peak_bytes, peak_blocks : int
        The highest so far.
    total_bytes, total_blocks : int
        Handed out since the start.
    """

    current_bytes: int
    current_blocks: int
    peak_bytes: int
    peak_blocks: int
    total_bytes: int
    total_blocks: int


@dataclass(frozen=True)
class Outstanding:
    """A live block of a tracked resource.

    Attributes
    ----------
    ptr, nbytes : int
        Its address, and the bytes asked for.
    stack : traceback.StackSummary or None
        Where it was asked for, the innermost call last; None without ``stacks=True``.
    """

    ptr: int
    nbytes: int
    stack: traceback.StackSummary | None


class TrackAdaptor(Adaptor):
    """A resource that knows its live blocks; see `track`."""

    def __init__(
        self, resource: MemoryResource, *, stacks: bool = False, name: str | None = None
    ) -> None:
        super().__init__((resource,), name=name)
        self._stacks = stacks

    def _note(self, buffer: Buffer, persistent: bool) -> traceback.StackSummary | None:
        if not self._stacks:
            return None
        caller = traceback.walk_stack(sys._getframe(1))
        stack = traceback.StackSummary.extract(caller, lookup_lines=False)
        stack.reverse()
        return stack

    def counts(self) -> TrackCounts:
        """Return the counters of this moment."""
        return TrackCounts(*self._counts())

    def reset_peaks(self) -> None:
        """Let the peaks begin anew at what is handed out now."""
        self._reset_peaks()

    def outstanding(self) -> list[Outstanding]:
        """Return the live blocks, the oldest first."""
        return [Outstanding(*found) for found in self._live()]

    def report(self) -> str:
        """Return the live blocks as text, the largest first, each with its stack."""
        lines = []
        for block in sorted(self.outstanding(), key=lambda block: -block.nbytes):
            lines.append(f"{block.nbytes} bytes at {block.ptr:#x}\n")
            lines.extend(block.stack.format() if block.stack is not None else ())
        return "".join(lines)


def track(
    resource: MemoryResource, *, stacks: bool = False, name: str | None = None
) -> TrackAdaptor:
    """Know what a resource has handed out, and to whom.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    stacks : bool, optional
        Keep with each block where it was asked for; a few microseconds per allocation.
    name : str, optional
        For people; the upstream's by default.

    Returns
    -------
    TrackAdaptor
        With `counts`, `reset_peaks`, `outstanding` and `report`.

    Raises
    ------
    TypeError
        `resource` is no MemoryResource.

    Examples
    --------
    >>> import gpumem
    >>> tracked = gpumem.track(gpumem.Arena("host"), stacks=True)
    >>> buffer = tracked.allocate(1000)
    >>> [(block.nbytes, block.stack[-1].name) for block in tracked.outstanding()]
    [(1000, '<module>')]
    """
    return TrackAdaptor(resource, stacks=stacks, name=name)

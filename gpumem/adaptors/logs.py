"""LogAdaptor: every allocation, free and failure is reported to a sink."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem.adaptors._adaptor import Adaptor, handle_or_zero, report, serve_from
from gpumem.device import MemoryInfo


@dataclass(frozen=True)
class MemoryEvent:
    """One event of a logged resource.

    Attributes
    ----------
    action : {"allocate", "free", "failure"}
        A block was allocated, freed, or could not be allocated.
    ptr : int
        Address of the block; 0 after a failure.
    nbytes : int
        Requested bytes.
    stream : int
        Handle of the stream it was allocated or freed on; 0 and 1 are the legacy default stream.
    time : int
        Nanoseconds since 1970.
    thread : int
        Identifier of the calling thread, as of `threading.get_ident`; a view may be dropped on a
        thread that Python did not start.
    memory : str
        Memory of the block, such as ``"cuda:0"``; after a failure the resource's.
    persistent : bool
        Whether it was allocated by ``allocate_persistent``; False for a free.
    error : str
        The exception of a failure.

    Examples
    --------
    >>> import gpumem
    >>> events = []
    >>> limited = gpumem.adaptors.limit(gpumem.Arena("host"), 1000)
    >>> logged = gpumem.adaptors.log(limited, events.append)
    >>> try:
    ...     logged.allocate(2000)
    ... except gpumem.OutOfMemoryError:
    ...     event = events[-1]
    >>> event.action, event.nbytes, event.error.partition(":")[0]
    ('failure', 2000, 'OutOfMemoryError')
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
    """A resource that reports every allocation, free and failure to a sink.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    sink : callable, file or logging.Logger
        A callable is called with each `MemoryEvent`. A text file receives comma-separated lines in
        the format of RMM's ``LoggingResourceAdaptor``, which ``gpumem replay`` reads. A Logger
        receives a record at INFO, for a failure at WARNING, with the attribute ``memory_event``.
    name : str, optional
        Name used in error messages and reports; the upstream's by default.

    Raises
    ------
    TypeError
        `resource` is not a MemoryResource, or `sink` is none of the three.

    Notes
    -----
    A sink is called where the event happened, finalizers included; an event that occurs inside the
    sink is reported right after. Several threads may be in it at once, and one may report an
    event of another: `thread` and `time` of an event are its own, and times of several threads'
    events may not rise. A view that is dropped on a thread without Python is reported later. An
    exception of the sink goes to ``sys.unraisablehook`` and does not affect the allocation. A block
    of 0 bytes has no memory, and no events.

    Examples
    --------
    >>> import gpumem
    >>> events = []
    >>> with gpumem.adaptors.log(gpumem.Arena("host"), events.append).allocate(1000):
    ...     pass
    >>> [(event.action, event.nbytes) for event in events]
    [('allocate', 1000), ('free', 1000)]
    """

    def __init__(self, resource: MemoryResource, sink: Sink, *, name: str | None = None) -> None:
        self._sink = _function_of(sink)
        self._events: collections.deque[MemoryEvent] = collections.deque()
        self._in_sink: set[int] = set()
        super().__init__((resource,), name=name, tells=True)
        if _is_file(sink):
            sink.write(_CSV_HEADER)

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        try:
            buffer = serve_from(self.upstreams[0], nbytes, stream, options, persistent)
        except BaseException as error:
            handle, memory = handle_or_zero(self, stream), str(self.memory)
            why = f"{type(error).__name__}: {error}"
            self._put(MemoryEvent("failure", 0, nbytes, handle, *_now(), memory, persistent, why))
            raise
        if buffer.allocated_nbytes:
            ptr, handle, memory = buffer.ptr, buffer.stream.ptr, str(buffer.memory)
            self._put(MemoryEvent("allocate", ptr, nbytes, handle, *_now(), memory, persistent))
        return buffer

    def _note(self, buffer: Buffer, persistent: bool) -> MemoryInfo:
        return buffer.memory  # a fallback's blocks are in several

    def _on_free(
        self, address: int, nbytes: int, stream: int, time: int, thread: int, note: Any
    ) -> None:
        self._put(MemoryEvent("free", address, nbytes, stream, time, thread, str(note)))

    def _put(self, event: MemoryEvent) -> None:
        """Pass events to the sink, oldest first; events of the sink's own calls come after it."""
        self._events.append(event)
        thread = threading.get_ident()
        if thread in self._in_sink:
            return
        self._in_sink.add(thread)
        try:
            while self._events:
                try:
                    event = self._events.popleft()
                except IndexError:  # another thread has taken it
                    break
                try:
                    self._sink(event)
                except Exception as error:
                    report(error, self._sink)
        finally:
            self._in_sink.discard(thread)


def _now() -> tuple[int, int]:
    return time.time_ns(), threading.get_ident()


def _is_file(sink: Sink) -> TypeGuard[_TextFile]:
    return hasattr(sink, "write")


def _function_of(sink: Sink) -> Callable[[MemoryEvent], object]:
    if isinstance(sink, logging.Logger):
        logger = sink

        def write_log(event: MemoryEvent) -> None:
            level = logging.WARNING if event.action == "failure" else logging.INFO
            text = "%s %d bytes at %#x in %s on stream %#x%s"
            where = (event.action, event.nbytes, event.ptr, event.memory, event.stream)
            error = event.error and f": {event.error}"
            logger.log(level, text, *where, error, extra={"memory_event": event})

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
        return sink
    raise TypeError(f"invalid sink {sink!r}: expected a callable, a file or a Logger")


log = LogAdaptor

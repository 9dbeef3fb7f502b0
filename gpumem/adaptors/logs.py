"""Telling a sink of every allocation and free."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

from gpumem._buffer.buffer import Buffer, MemoryResource
from gpumem.adaptors._adaptor import Adaptor, handle_or_zero, report, serve_from

__all__ = ["LogAdaptor", "MemoryEvent", "Sink", "log"]


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
    """A resource that tells a sink of every allocation and free; see `log`.

    Examples
    --------
    >>> import gpumem, io
    >>> file = io.StringIO()
    >>> LogAdaptor(gpumem.Arena("host"), file).allocate(1000).close()
    >>> [line.split(",")[2] for line in file.getvalue().splitlines()]
    ['Action', 'allocate', 'free']
    """

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

    def _on_free(self, address: int, nbytes: int, stream: int, time: int, thread: int) -> None:
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
    >>> with gpumem.adaptors.log(gpumem.Arena("host"), events.append).allocate(1000):
    ...     pass
    >>> [(event.action, event.nbytes) for event in events]
    [('allocate', 1000), ('free', 1000)]
    """
    return LogAdaptor(resource, sink, name=name)

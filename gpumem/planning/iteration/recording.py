"""Recording an iteration of a running program, for a plan of it."""

from __future__ import annotations

from gpumem._buffer.buffer import MemoryResource
from gpumem.adaptors import MemoryEvent, log
from gpumem.traces.builder import Recorder
from gpumem.traces.trace import Trace

__all__ = ["IterationRecording"]


class IterationRecording:
    """Records what is allocated through its `resource`, from the beginning to `trace`.

    Persistent blocks and those of 0 bytes are left out: a plan has no place for them.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.

    Attributes
    ----------
    resource : MemoryResource
        What the iteration allocates from instead of `upstream`.

    Raises
    ------
    TypeError
        `upstream` is not a MemoryResource.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.planning import plan
    >>> recording = IterationRecording(gpumem.Arena("host"))
    >>> for nbytes in (1000, 2000):
    ...     recording.resource.allocate(nbytes).close()
    >>> plan(recording.trace()).peak_bytes
    2048
    """

    def __init__(self, upstream: MemoryResource) -> None:
        self._events: list[MemoryEvent] = []
        self.resource = log(upstream, self._events.append)

    def trace(self, name: str = "recording") -> Trace:
        """Return what was recorded until now."""
        recorder = Recorder()
        live: set[int] = set()  # addresses of blocks that are in the recording
        overtaken: set[int] = set()  # given out again on one thread before another told its free
        for number, event in enumerate(list(self._events)):
            what = (f"event {number}", event.ptr, event.nbytes, event.stream, event.time // 1000)
            if event.action == "allocate" and event.ptr and not event.persistent:
                if event.ptr in live:
                    overtaken.add(event.ptr)
                    recorder.free_completed(*what)
                recorder.alloc(*what)
                live.add(event.ptr)
            elif event.action == "free" and event.ptr in overtaken:
                overtaken.remove(event.ptr)
            elif event.action == "free" and event.ptr in live:
                live.remove(event.ptr)
                recorder.free_completed(*what)
        return recorder.trace(name, {})

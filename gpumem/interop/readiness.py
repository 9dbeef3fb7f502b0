"""What a tensor in imported memory waits for: a point of its producer's timeline."""

from __future__ import annotations

from typing import Any

__all__ = ["point_of"]


def point_of(timeline: Any, value: int | None, timeout: float | None) -> Any:
    """Return what tensors wait for: an object with wait() and enqueue_wait(stream)."""
    if value is not None:
        timeline = timeline.point(value)
    elif not hasattr(timeline, "enqueue_wait") or not hasattr(timeline, "timeline"):
        raise TypeError(f"{timeline!r} is no point of a timeline: a timeline takes a value with it")
    return timeline if timeout is None else _Patience(timeline, timeout)


class _Patience:
    """A point that the CPU waits for no longer than it is told to."""

    def __init__(self, point: Any, timeout: float) -> None:
        if not timeout >= 0:
            raise ValueError(f"timeout {timeout!r} is not a number of seconds from 0")
        self.timeline, self.value = point.timeline, point.value
        self.enqueue_wait = point.enqueue_wait
        self._point, self._timeout = point, timeout

    def wait(self) -> None:
        """Wait as long as allowed."""
        self._point.wait(self._timeout)

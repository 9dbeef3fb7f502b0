"""What a tensor in imported memory waits for: a point of its producer's timeline."""

from __future__ import annotations

from typing import Any

from gpumem.device import Device
from gpumem.errors import DeviceMismatchError

__all__ = ["point_of"]


def point_of(device: Device, timeline: Any, value: int | None, timeout: float | None) -> Any:
    """Return what tensors on a device wait for: an object with wait() and enqueue_wait(stream)."""
    point = timeline
    if value is not None:
        if not hasattr(timeline, "point"):
            raise TypeError(f"{timeline!r} is no timeline, and a point has its value already")
        point = timeline.point(value)
    elif not hasattr(timeline, "enqueue_wait") or not hasattr(timeline, "timeline"):
        raise TypeError(f"{timeline!r} is no point of a timeline: a timeline takes a value with it")
    belongs = getattr(point.timeline, "device", None)
    if belongs is not None and belongs != device:
        raise DeviceMismatchError(f"the timeline belongs to {belongs}, and the memory to {device}")
    return point if timeout is None else _Patience(point, timeout)


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

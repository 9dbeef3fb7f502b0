"""Blocks for libraries that name no stream: usable by every stream, and back behind all of them.

A block is allocated on a stream on which nothing runs. Whatever the resource lets that stream wait
for, the CPU waits for, so that at return no work that was queued before touches the block. It is
freed on another such stream, which is made to wait for everything that is queued on the device at
that moment; its resource gives it to nobody before that is done.
"""

from __future__ import annotations

from typing import Any

from gpumem._buffer import Buffer, MemoryResource
from gpumem._forks import ForkLock
from gpumem._stream import Event, Stream
from gpumem.device import Device
from gpumem.errors import GpumemError

__all__ = ["Fence"]

_LEGACY = 0


class Fence:
    """Takes and gives back blocks of one device's resources, for callers without streams.

    Parameters
    ----------
    device : Device

    Notes
    -----
    "Everything that is queued" is the driver's cuCtxRecordEvent (CUDA 12.5); where that is not to
    be had it is an event on the legacy default stream, which comes after every stream but those
    made with the non-blocking flag.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = ForkLock()
        self._takes = Stream(device)
        self._frees = Stream(device)
        self._legacy = Stream.from_handle(device, _LEGACY)
        self._context = _primary_context(device)
        self._waiting: list[Buffer] = []

    @property
    def covers_non_blocking_streams(self) -> bool:
        """Whether frees wait for streams that do not wait for the legacy default stream, too."""
        return self._context is not None

    def allocate(self, resource: MemoryResource, nbytes: int) -> Buffer:
        """Return a block that every stream may use at once."""
        if self._waiting:
            self._give_waiting()
        buffer = resource.allocate(nbytes, self._takes)
        if not self._takes.query():
            self._takes.synchronize()
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Free a block behind everything that is queued now; never waits, never raises.

        Where the driver refuses, while a graph is captured say, the block waits for a later call.
        """
        try:
            self._give(buffer)
        except GpumemError:
            self._waiting.append(buffer)

    def drain(self) -> None:
        """Wait for the device, and free what was given back meanwhile.

        Raises
        ------
        DriverError
            The device does not answer.
        """
        self._device.synchronize()
        self._give_waiting()
        self._frees.synchronize()

    def _give(self, buffer: Buffer) -> None:
        with self._lock:
            self._frees.wait(self._everything())
            buffer.close(self._frees)

    def _give_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for buffer in waiting:
            self.give(buffer)

    def _everything(self) -> Event:
        if self._context is not None:
            event = Event(self._device)
            if _record_all(self._context, event):
                return event
            self._context = None
        return self._legacy.record()


def _primary_context(device: Device) -> Any | None:
    """Return the driver's object for the device's context, if its events can cover all of it."""
    if device.type != "cuda":
        return None
    from cuda.bindings import driver

    if not hasattr(driver, "cuCtxRecordEvent"):
        return None
    status, ordinal = driver.cuDeviceGet(device.index)
    if status != driver.CUresult.CUDA_SUCCESS:
        return None
    status, context = driver.cuDevicePrimaryCtxRetain(ordinal)
    # gpumem's own reference keeps the context; this one was for its handle.
    if status != driver.CUresult.CUDA_SUCCESS:
        return None
    driver.cuDevicePrimaryCtxRelease(ordinal)
    return context


def _record_all(context: Any, event: Event) -> bool:
    """Record an event behind all work of a context; False where the driver cannot."""
    from cuda.bindings import driver

    try:
        (status,) = driver.cuCtxRecordEvent(context, event.ptr)
    except (RuntimeError, TypeError):  # an older driver has no such function
        return False
    if status == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
        raise GpumemError("a stream of the device captures a graph")
    return bool(status == driver.CUresult.CUDA_SUCCESS)

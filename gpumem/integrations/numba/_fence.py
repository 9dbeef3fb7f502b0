"""Blocks for callers without streams: a fence orders them after all work of the device."""

from __future__ import annotations

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Event, Stream, record_all_work
from gpumem._support.forks import ForkLock
from gpumem.device import Device
from gpumem.errors import GpumemError

_LEGACY_STREAM = 0


class Fence:
    """Allocates and frees blocks of one device's resources, for callers without streams.

    Parameters
    ----------
    device : Device

    Notes
    -----
    A free waits for everything that is queued on the device, by the driver's cuCtxRecordEvent
    (CUDA 12.5). Without that function it waits for an event on the legacy default stream, which
    comes after every stream except those made with the non-blocking flag.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = ForkLock()
        self._allocation_stream = Stream(device)
        self._free_stream = Stream(device)
        self._legacy = Stream.from_handle(device, _LEGACY_STREAM)
        self._waiting: list[Buffer] = []

    def allocate(self, resource: MemoryResource, nbytes: int) -> Buffer:
        """Return a block that every stream may use at once."""
        if self._waiting:
            self._free_waiting()
        buffer = resource.allocate(nbytes, self._allocation_stream)
        if not self._allocation_stream.query():
            self._allocation_stream.synchronize()
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Free a block after everything that is queued now, without waiting or raising.

        If the driver call fails, for example during a graph capture, a later call frees the block.
        """
        try:
            event = Event(self._device)
            with self._lock:
                self._free_stream.wait(event if record_all_work(event) else self._legacy.record())
                buffer.close(self._free_stream)
        except GpumemError:
            self._waiting.append(buffer)

    def drain(self) -> None:
        """Wait for the device, and free the blocks that could not be freed before.

        Raises
        ------
        DriverError
            A driver call failed.
        """
        self._device.synchronize()
        self._free_waiting()
        self._free_stream.synchronize()

    def _free_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for buffer in waiting:
            self.free(buffer)

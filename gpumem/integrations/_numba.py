"""Numba's memory manager over gpumem's resources: a plugin for Numba's interface, version 1.

Numba passes no stream, so a `Fence` allocates and frees its blocks. A block is allocated on a
stream on which nothing runs. If the resource made that stream wait for earlier work, the CPU waits
for it too, so that no work queued before still uses the block when it is returned. A block is freed
on another idle stream, which first waits for everything that is queued on the device at that
moment; its resource does not reuse it before that is done.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Event, Stream
from gpumem._events.recorder import framework_events
from gpumem._support.forks import ForkLock
from gpumem.device import Device
from gpumem.errors import GpumemError, IntegrationError, OutOfMemoryError
from gpumem.integrations._resources import Resources, allocated

__all__ = ["Fence", "manager_class"]

_INTERFACE = 1
_LEGACY_STREAM = 0


def manager_class(resources: Resources, pinned: Resources | None, device_type: str = "cuda") -> Any:
    """Make the class of which Numba creates one manager for each context.

    Parameters
    ----------
    resources : Resources
        Of device arrays.
    pinned : Resources or None
        Of pinned and mapped host arrays; None: they come from the driver.
    device_type : str
        "host" in tests without a GPU.
    """
    from numba import cuda
    from numba.cuda.cudadrv import driver

    no_memory = _out_of_memory_class(driver)

    class GpumemManager(driver.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
        """Numba's blocks of one context, from gpumem."""

        def __init__(self, *, context: Any) -> None:
            super().__init__(context=context)
            self._blocks: _LiveBlocks | None = None  # Numba may reset before it initialises

        @property
        def interface_version(self) -> int:
            return _INTERFACE

        def initialize(self) -> None:
            if self._blocks is None:
                self._blocks = _LiveBlocks(Device(f"{device_type}:{self.context.device.id}"))

        def reset(self) -> None:
            super().reset()
            if self._blocks is not None:
                self._blocks.free_all()

        def memalloc(self, size: int) -> Any:
            address, finalizer = self._allocate(resources, size)
            pointer = driver.binding.CUdeviceptr(address)
            context = weakref.proxy(self.context)
            return driver.MemoryPointer(context, pointer, size, finalizer=finalizer)

        def memhostalloc(
            self, size: int, mapped: bool = False, portable: bool = False, wc: bool = False
        ) -> Any:
            # gpumem has no write-combined memory.
            if pinned is None or wc:
                return super().memhostalloc(size, mapped, portable, wc)
            address, finalizer = self._allocate(pinned, size)
            context = weakref.proxy(self.context)
            if not mapped:
                return driver.PinnedMemory(context, address, size, finalizer=finalizer)
            return self._mapped(context, address, size, finalizer)

        def _mapped(
            self, context: Any, address: int, size: int, finalizer: Callable[[], None]
        ) -> Any:
            # Numba counts references to it but holds none itself, so the manager holds one.
            allocations = self.allocations

            def free() -> None:
                allocations.pop(address, None)
                finalizer()

            memory = driver.MappedMemory(context, address, size, finalizer=free)
            allocations[address] = memory
            return memory.own()

        def get_memory_info(self) -> Any:
            self.initialize()
            device = Device(f"{device_type}:{self.context.device.id}")
            stats = resources.of(device.index).stats()
            total, free = device.total_bytes, device.free_bytes + stats.reserved - stats.in_use
            if stats.limit:
                total = min(total, stats.limit)
                free = min(free, stats.limit - stats.in_use)
            return driver.MemoryInfo(free=free, total=total)

        def get_ipc_handle(self, memory: Any) -> Any:
            try:
                return super().get_ipc_handle(memory)
            except driver.CudaAPIError as error:
                raise IntegrationError(
                    f"the driver cannot export this memory by an IPC handle ({error}): use an "
                    "Arena with backing = 'regions', or gpumem.interop.export, which shares blocks "
                    "of any arena"
                ) from error

        def _allocate(self, chosen: Resources, size: int) -> tuple[int, Callable[[], None]]:
            self.initialize()
            assert self._blocks is not None
            resource, blocks = chosen.of(self.context.device.id), self._blocks
            return allocated(lambda: blocks.allocate(resource, size), self._collect, no_memory)

        def _collect(self) -> None:
            # Numba's own manager also frees dropped arrays before it reports an error.
            self.deallocations.clear()
            gc.collect()
            assert self._blocks is not None
            self._blocks.fence.drain()

    return GpumemManager


class _LiveBlocks:
    """The live blocks of one context, by address.

    Numba's finalizers may run late, at exit even after `free_all`: a freed block is skipped.
    """

    def __init__(self, device: Device) -> None:
        self.fence = Fence(device)
        self._live: dict[int, Buffer] = {}

    def allocate(self, resource: MemoryResource, size: int) -> tuple[int, Callable[[], None]]:
        """Return the address of a new block, and the function that frees it."""
        with framework_events("numba"):
            buffer = self.fence.allocate(resource, size)
        live, fence, address = self._live, self.fence, buffer.ptr
        if address:
            live[address] = buffer

        def finalizer() -> None:
            # By then another block may have the address.
            if live.get(address) is buffer:
                del live[address]
                fence.free(buffer)

        return address, finalizer

    def free_all(self) -> None:
        """Free every block that is still live."""
        while self._live:
            _, buffer = self._live.popitem()
            self.fence.free(buffer)


def _out_of_memory_class(driver: Any) -> Callable[[OutOfMemoryError], Exception]:
    """Make the exception class that Numba's callers and gpumem's callers both catch."""

    def __init__(self: Any, error: OutOfMemoryError) -> None:
        # The bases' own would call each other.
        self.code = driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.msg = str(error)
        Exception.__init__(self, self.code, self.msg)
        self.__dict__.update(error.__dict__)

    names = {"__init__": __init__, "__module__": __name__}
    names["__doc__"] = "Memory for Numba is out in gpumem; see gpumem.OutOfMemoryError."
    return type("OutOfMemoryError", (driver.CudaAPIError, OutOfMemoryError), names)


# ---- blocks for callers without streams ----------------------------------------------------------


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
        self._context = _primary_context(device)
        self._waiting: list[Buffer] = []

    @property
    def covers_non_blocking_streams(self) -> bool:
        """Whether frees wait for streams that do not wait for the legacy default stream, too."""
        return self._context is not None

    def allocate(self, resource: MemoryResource, nbytes: int) -> Buffer:
        """Return a block that every stream may use at once."""
        if self._waiting:
            self._free_waiting()
        buffer = resource.allocate(nbytes, self._allocation_stream)
        if not self._allocation_stream.query():
            self._allocation_stream.synchronize()
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Free a block behind everything that is queued now, without waiting or raising.

        If the driver call fails, for example during a graph capture, a later call frees the block.
        """
        try:
            self._free(buffer)
        except GpumemError:
            self._waiting.append(buffer)

    def drain(self) -> None:
        """Wait for the device, and free the blocks whose free had failed.

        Raises
        ------
        DriverError
            A driver call failed.
        """
        self._device.synchronize()
        self._free_waiting()
        self._free_stream.synchronize()

    def _free(self, buffer: Buffer) -> None:
        with self._lock:
            self._free_stream.wait(self._everything())
            buffer.close(self._free_stream)

    def _free_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for buffer in waiting:
            self.free(buffer)

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

"""Numba's memory manager over gpumem's resources: a plugin for Numba's interface, version 1.

Numba passes no stream, so a `Fence` allocates and frees its blocks. A block is allocated on a
stream on which nothing runs. If the resource made that stream wait for earlier work, the CPU waits
for it too, so that no work queued before still uses the block when it is returned. A block is freed
on another idle stream, which first waits for everything that is queued on the device at that
moment; its resource does not reuse it before that is done.

This module imports Numba, so it is imported only where Numba is used.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda.cudadrv import driver

from gpumem import errors
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._events.recorder import framework_events
from gpumem.device import Device
from gpumem.errors import IntegrationError
from gpumem.integrations._common.resources import Resources, allocated
from gpumem.integrations.numba._fence import Fence

_INTERFACE = 1


def manager_class(
    resources: Resources | None, pinned: Resources | None, device_type: str = "cuda"
) -> Any:
    """Return the class of which Numba creates one manager for each context.

    Parameters
    ----------
    resources : Resources or None
        Of device arrays; None: they have Numba's own memory.
    pinned : Resources or None
        Of pinned and mapped host arrays; None: they come from the driver.
    device_type : str
        "host" in tests without a GPU.
    """
    parts = {"resources": resources, "pinned": pinned, "device_type": device_type}
    return type("GpumemManager", (PinnedManager if resources is None else GpumemManager,), parts)


class _HostBlocks:
    """The part of a manager that has pinned and mapped arrays, and the blocks of one context."""

    pinned: Resources | None
    device_type: str
    context: Any
    allocations: Any
    deallocations: Any

    def __init__(self, *, context: Any) -> None:
        super().__init__(context=context)  # type: ignore[call-arg]
        self._blocks: _LiveBlocks | None = None  # Numba may reset before it initialises

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        if self._blocks is None:
            self._blocks = _LiveBlocks(Device(f"{self.device_type}:{self.context.device.id}"))

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        if self._blocks is not None:
            self._blocks.free_all()

    def memhostalloc(
        self, size: int, mapped: bool = False, portable: bool = False, wc: bool = False
    ) -> Any:
        # gpumem has no write-combined memory.
        if self.pinned is None or wc:
            return super().memhostalloc(size, mapped, portable, wc)  # type: ignore[misc]
        address, finalizer = self._allocate(self.pinned, size)
        context = weakref.proxy(self.context)
        if not mapped:
            return driver.PinnedMemory(context, address, size, finalizer=finalizer)
        return self._mapped(context, address, size, finalizer)

    def _mapped(self, context: Any, address: int, size: int, finalizer: Callable[[], None]) -> Any:
        # Numba counts references to it but holds none itself, so the manager holds one.
        allocations = self.allocations

        def free() -> None:
            allocations.pop(address, None)
            finalizer()

        memory = driver.MappedMemory(context, address, size, finalizer=free)
        allocations[address] = memory
        return memory.own()

    def _allocate(self, chosen: Resources, size: int) -> tuple[int, Callable[[], None]]:
        self.initialize()
        assert self._blocks is not None
        resource, blocks = chosen.of(self.context.device.id), self._blocks
        return allocated(
            lambda: blocks.allocate(resource, size), self._collect, NumbaOutOfMemoryError
        )

    def _collect(self) -> None:
        # Numba's own manager also frees dropped arrays before it reports an error.
        self.deallocations.clear()
        gc.collect()
        assert self._blocks is not None
        self._blocks.fence.drain()


class GpumemManager(
    _HostBlocks,
    driver.GetIpcHandleMixin,  # type: ignore[misc]
    cuda.HostOnlyCUDAMemoryManager,  # type: ignore[misc]
):
    """Numba's blocks of one context, from gpumem."""

    resources: Resources

    @property
    def interface_version(self) -> int:
        return _INTERFACE

    def memalloc(self, size: int) -> Any:
        address, finalizer = self._allocate(self.resources, size)
        pointer = driver.binding.CUdeviceptr(address)
        context = weakref.proxy(self.context)
        return driver.MemoryPointer(context, pointer, size, finalizer=finalizer)

    def get_memory_info(self) -> Any:
        self.initialize()
        device = Device(f"{self.device_type}:{self.context.device.id}")
        stats = self.resources.of(device.index).stats()
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


class PinnedManager(_HostBlocks, driver.NumbaCUDAMemoryManager):  # type: ignore[misc]
    """Numba's own manager, with pinned and mapped arrays from gpumem."""


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


class NumbaOutOfMemoryError(driver.CudaAPIError, errors.OutOfMemoryError):  # type: ignore[misc]
    """Memory for Numba is out in gpumem; Numba's callers and gpumem's callers both catch it."""

    def __init__(self, error: errors.OutOfMemoryError) -> None:
        # The bases' own would call each other.
        self.code = driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.msg = str(error)
        Exception.__init__(self, self.code, self.msg)
        self.__dict__.update(error.__dict__)

"""Numba's memory manager over gpumem's resources: a plugin by Numba's interface, version 1.

Numba names no stream, so blocks are taken and given back through a `Fence`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from gpumem._buffer import Buffer, MemoryResource
from gpumem.device import Device
from gpumem.errors import IntegrationError, OutOfMemoryError
from gpumem.integrations._fence import Fence
from gpumem.integrations._resources import Resources
from gpumem.observe._recording import asked_by

__all__ = ["manager_class"]

_INTERFACE = 1


def manager_class(resources: Resources, pinned: Resources | None, device_type: str = "cuda") -> Any:
    """Make the class that Numba makes a manager of for each context.

    Parameters
    ----------
    resources : Resources
        Of device arrays.
    pinned : Resources or None
        Of pinned and mapped host arrays; None: Numba asks the driver.
    device_type : str
        "host" rehearses without a GPU.
    """
    from numba import cuda
    from numba.cuda.cudadrv import driver

    no_memory = _out_of_memory_class(driver)

    class GpumemManager(driver.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
        """Numba's blocks of one context, from gpumem."""

        def __init__(self, *, context: Any) -> None:
            super().__init__(context=context)
            self._books: _Books | None = None  # Numba may reset before it initialises

        @property
        def interface_version(self) -> int:
            return _INTERFACE

        def initialize(self) -> None:
            if self._books is None:
                self._books = _Books(Device(f"{device_type}:{self.context.device.id}"))

        def reset(self) -> None:
            super().reset()
            if self._books is not None:
                self._books.give_all()

        def memalloc(self, size: int) -> Any:
            address, finalizer = self._take(resources, size)
            pointer = driver.binding.CUdeviceptr(address)
            context = weakref.proxy(self.context)
            return driver.MemoryPointer(context, pointer, size, finalizer=finalizer)

        def memhostalloc(
            self, size: int, mapped: bool = False, portable: bool = False, wc: bool = False
        ) -> Any:
            # Write-combined pages are the driver's alone.
            if pinned is None or wc:
                return super().memhostalloc(size, mapped, portable, wc)
            address, finalizer = self._take(pinned, size)
            context = weakref.proxy(self.context)
            if not mapped:
                return driver.PinnedMemory(context, address, size, finalizer=finalizer)
            return self._mapped(context, address, size, finalizer)

        def _mapped(
            self, context: Any, address: int, size: int, finalizer: Callable[[], None]
        ) -> Any:
            # Numba counts references to it and holds none itself: the manager does.
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
                    f"the driver gives no IPC handle of this memory ({error}): pages that move and "
                    "pools have none. An Arena with backing = 'regions' has; gpumem.interop.export "
                    "shares blocks of any arena"
                ) from error

        def _take(self, chosen: Resources, size: int) -> tuple[int, Callable[[], None]]:
            self.initialize()
            assert self._books is not None
            resource = chosen.of(self.context.device.id)
            try:
                return self._books.take(resource, size)
            except OutOfMemoryError:
                pass  # as Numba does: once more, when what was dropped is free
            self.deallocations.clear()
            gc.collect()
            self._books.fence.drain()
            try:
                return self._books.take(resource, size)
            except OutOfMemoryError as error:
                raise no_memory(error) from error

    return GpumemManager


class _Books:
    """The live blocks of one context, by address.

    Numba's finalizers may run late, at exit also after `give_all`: what is gone is gone.
    """

    def __init__(self, device: Device) -> None:
        self.fence = Fence(device)
        self._live: dict[int, Buffer] = {}

    def take(self, resource: MemoryResource, size: int) -> tuple[int, Callable[[], None]]:
        """Return a block's address, and what gives it back."""
        with asked_by("numba"):
            buffer = self.fence.allocate(resource, size)
        live, fence, address = self._live, self.fence, buffer.ptr
        if address:
            live[address] = buffer

        def finalizer() -> None:
            # Only this block: the address may be another's by then.
            if live.get(address) is buffer:
                del live[address]
                fence.give(buffer)

        return address, finalizer

    def give_all(self) -> None:
        """Give back every block that is still out."""
        while self._live:
            _, buffer = self._live.popitem()
            self.fence.give(buffer)


def _out_of_memory_class(driver: Any) -> Callable[[OutOfMemoryError], Exception]:
    """Make the exception that Numba's callers and gpumem's callers both catch."""

    def __init__(self: Any, error: OutOfMemoryError) -> None:
        # The bases' own would call each other.
        self.code = driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.msg = str(error)
        Exception.__init__(self, self.code, self.msg)
        self.__dict__.update(error.__dict__)

    names = {"__init__": __init__, "__module__": __name__}
    names["__doc__"] = "Numba is out of memory that gpumem gives it; see gpumem.OutOfMemoryError."
    return type("OutOfMemoryError", (driver.CudaAPIError, OutOfMemoryError), names)

"""CuPy on gpumem's memory: arrays, and pinned host memory.

The setting applies to the whole process and can be changed at any time; arrays keep their memory.
In one thread, CuPy's own ``cupy.cuda.using_allocator`` has precedence; it accepts the function that
`allocator` returns.

Examples
--------
>>> import cupy  # doctest: +SKIP
>>> import gpumem
>>> import gpumem.integrations.cupy
>>> gpumem.integrations.cupy.enable(gpumem.Arena("cuda:0"))  # doctest: +SKIP
>>> cupy.empty(1000).data.mem._owner  # doctest: +SKIP
<gpumem.Buffer ...>
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from gpumem._buffer.resource import MemoryResource
from gpumem.device import MemoryKind
from gpumem.errors import IntegrationError, OutOfMemoryError
from gpumem.integrations._common.callers import CupyAllocator, CurrentStream, PointerMaker
from gpumem.integrations._common.resources import (
    REACHABLE,
    ResourceLike,
    Resources,
    allocated,
    setting_with_pinned,
)
from gpumem.integrations._common.switch import Framework, Setting, Status, Switch, Using
from gpumem.integrations._common.versions import import_framework, require_gpu

__all__ = ["allocator", "disable", "enable", "enable_pinned", "status", "using"]
__dir__ = __all__.copy

_OLDEST = "13.0"
_INSTALL = "pip install cupy-cuda13x"
_device_type = "cuda"  # "host" in tests without a GPU


def enable(resource: ResourceLike = None, *, pinned: bool | MemoryResource | None = None) -> None:
    """Let CuPy allocate all memory from gpumem, in every thread and from now on.

    A block belongs to the stream that is current in CuPy when it is allocated, and is freed on that
    stream. While a stream captures a graph, blocks come from a graph pool that lives as long as the
    graph.

    Parameters
    ----------
    resource : MemoryResource, several of them, a mapping by device, or None
        DEVICE, MANAGED or HOST_ACCESSIBLE memory of CUDA devices. A device without one uses its
        `gpumem.get_default_resource`, made at its first allocation.
    pinned : bool or MemoryResource, optional
        Whether pinned host memory comes from gpumem too, or the HOST_ACCESSIBLE resource for it.
        True, the default, means the default resource of the current device's pinned memory.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        CuPy is not installed, is too old or is built for ROCm; or this is called inside a `using`
        or inside CuPy's ``using_allocator``.
    ConfigError, TypeError
        CuPy cannot use a resource.

    Notes
    -----
    If memory is out, also after a garbage collection, CuPy's callers see an exception that is a
    ``cupy.cuda.memory.OutOfMemoryError``, a ``CUDARuntimeError`` with the status
    cudaErrorMemoryAllocation, and a `gpumem.OutOfMemoryError` with its report.

    CuPy's memory hooks and ``cupy.get_default_memory_pool()`` do not count this memory, because
    they belong to CuPy's pool. The stream of a ``cupy.cuda.ExternalStream`` must outlive the arrays
    that were made on it, or be passed to ``resource.reset_stream`` first; gpumem keeps CuPy's own
    streams alive.

    CuPy does not report its current pinned allocator, so `disable` restores CuPy's default pool. If
    you have set another pinned allocator, pass ``pinned=False``.
    """
    _switch.enable(setting_with_pinned(_resources(resource), pinned))


def enable_pinned(resource: MemoryResource | None = None) -> None:
    """Let CuPy allocate pinned memory from gpumem, and leave the memory of its arrays as it is.

    Parameters
    ----------
    resource : MemoryResource, optional
        HOST_ACCESSIBLE memory of a CUDA device. None means the default resource of the current
        device's pinned memory, which PyTorch and Numba use, too, where their pinned memory comes
        from gpumem. Its limit is that of the arena: ``resource.set_limit("16GiB")``.

    Raises
    ------
    MissingFrameworkError, IntegrationError, ConfigError, TypeError
        As `enable`.
    """
    chosen = True if resource is None else resource
    _switch.enable(setting_with_pinned(_resources(None), chosen, alone=True))


def disable() -> None:
    """Restore the allocators that CuPy had before the first `enable`.

    Arrays that were made since then keep their memory. Does nothing if gpumem is not enabled.

    Raises
    ------
    IntegrationError
        This is called inside a `using`, or inside CuPy's ``using_allocator``.
    """
    _switch.disable()


def using(resource: ResourceLike = None, *, pinned: bool | MemoryResource | None = None) -> Using:
    """Do as `enable`, inside a ``with`` block; its end restores the allocators before it.

    It applies to the whole process, too. Blocks can be nested; each must end on the thread that
    began it, the innermost first.

    Raises
    ------
    ConfigError, TypeError
        Raised by this call: CuPy cannot use a resource. Entering raises the others of `enable`.
    """
    return Using(_switch, setting_with_pinned(_resources(resource), pinned))


def status() -> Status:
    """Return which memory CuPy uses now."""
    return _switch.status()


def allocator(resource: ResourceLike = None) -> Callable[[int], Any]:
    """Return an allocator function for ``cupy.cuda.using_allocator``, ``MemoryPool`` and others.

    Parameters
    ----------
    resource
        As `enable`.

    Returns
    -------
    callable
        ``function(nbytes) -> cupy.cuda.MemoryPointer``.

    Raises
    ------
    MissingFrameworkError, IntegrationError, ConfigError, TypeError
        As `enable`.
    """
    return _parts().allocator(_resources(resource))


# ---- arguments -----------------------------------------------------------------------------------


def _resources(given: ResourceLike) -> Resources:
    kinds = (MemoryKind.HOST,) if _device_type == "host" else REACHABLE
    return Resources("CuPy", given, kinds=kinds, device_type=_device_type)


# ---- CuPy's side ---------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The objects of CuPy that gpumem uses, looked up once."""

    cuda: Any
    current: CurrentStream
    maker: PointerMaker
    no_memory: Callable[[OutOfMemoryError], Exception]

    def allocator(self, resources: Resources) -> Callable[[int], Any]:
        return CupyAllocator(resources, self.current, self.maker, self.no_memory).malloc

    def pinned_allocator(self, resources: Resources) -> Callable[[int], Any]:
        def allocate_pinned(nbytes: int) -> Any:
            resource = resources.of(self.cuda.device.get_device_id())
            block = allocated(lambda: resource.allocate(nbytes), gc.collect, self.no_memory)
            # CuPy uses the address and the size, and keeps the object, which keeps the block.
            memory = SimpleNamespace(ptr=block.ptr, size=block.nbytes, buffer=block)
            return self.cuda.PinnedMemoryPointer(memory, 0)

        return allocate_pinned


@cache
def _parts() -> _Parts:
    cupy = import_framework("CuPy", "cupy", _OLDEST, install=_INSTALL)
    cuda = cupy.cuda
    if getattr(cuda.runtime, "is_hip", False):
        raise IntegrationError("this CuPy is built for ROCm; gpumem supports CUDA devices only")
    current = CurrentStream(cuda.device.get_device_id, cuda.get_current_stream, _capsules(cuda))
    maker = PointerMaker(cuda.UnownedMemory, cuda.MemoryPointer)
    from gpumem.integrations.cupy._errors import CupyOutOfMemoryError

    return _Parts(cuda, current, maker, CupyOutOfMemoryError)


def _capsules(cuda: Any) -> tuple[object, object] | None:
    """Return CuPy's C functions for the current device and stream, where it exports them."""
    try:
        from cupy_backends.cuda import stream

        return cuda.device.__pyx_capi__["get_device_id"], stream.__pyx_capi__["get_stream_ptr"]
    except (ImportError, AttributeError, KeyError):
        return None


# CuPy's allocator, and gpumem's of pinned memory; None: CuPy's own.
_Before: TypeAlias = tuple[Callable[[int], Any], Callable[[int], Any] | None]


class _CuPy(Framework):
    name = "CuPy"

    def __init__(self) -> None:
        self._pinned: Callable[[int], Any] | None = None

    def attach(self, setting: Setting) -> _Before:
        parts = _parts()
        if _device_type == "cuda":
            require_gpu(self.name)
        pinned = setting.option("pinned")
        before = parts.cuda.get_allocator(), self._pinned
        after = before[0] if setting.option("alone") else parts.allocator(setting.resources)
        self._put(after, None if pinned is None else parts.pinned_allocator(pinned))
        return before

    def restore(self, before: _Before) -> None:
        self._put(*before)

    def _put(self, allocator: Callable[[int], Any], pinned: Callable[[int], Any] | None) -> None:
        cuda = _parts().cuda
        try:
            cuda.set_allocator(allocator)
        except ValueError as error:
            raise IntegrationError(
                "CuPy's allocator cannot be switched inside cupy.cuda.using_allocator"
            ) from error
        if pinned is not None or self._pinned is not None:
            import cupy

            own = cupy.get_default_pinned_memory_pool().malloc
            cuda.set_pinned_memory_allocator(own if pinned is None else pinned)
        self._pinned = pinned


_switch = Switch(_CuPy())

"""Numba's CUDA arrays on gpumem's memory, through Numba's interface for memory managers.

The setting applies to the whole process. Numba makes its memory manager with the first context and
keeps it, so `enable`, `disable` and `using` must be called before that: before the first array,
kernel or stream.

``NUMBA_CUDA_MEMORY_MANAGER=gpumem.integrations.numba`` in the environment has the effect of
`enable()`.

Examples
--------
>>> import gpumem
>>> import gpumem.integrations.numba
>>> gpumem.integrations.numba.enable(gpumem.Arena("cuda:0"))  # doctest: +SKIP
>>> from numba import cuda  # doctest: +SKIP
>>> cuda.device_array(1000)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from gpumem._buffer.resource import MemoryResource
from gpumem.errors import IntegrationError
from gpumem.integrations._common.resources import ResourceLike, Resources, setting_with_pinned
from gpumem.integrations._common.switch import Framework, Setting, Status, Switch, Using
from gpumem.integrations._common.versions import import_framework, require_gpu

__all__ = ["disable", "enable", "enable_pinned", "status", "using"]
__dir__ = __all__.copy

_OLDEST = "0.10"
_INSTALL = "pip install numba-cuda"


def enable(resource: ResourceLike = None, *, pinned: bool | MemoryResource | None = None) -> None:
    """Let Numba allocate device and pinned memory from gpumem, from its first context on.

    Numba passes no stream when it allocates or frees. Therefore a block is returned only after all
    earlier work on it has completed, and its memory is reused only after all work that was queued
    on the device when its array was dropped. The CPU waits only if the arena reuses a block with
    unfinished earlier work.

    Parameters
    ----------
    resource : MemoryResource, several of them, a mapping by device, or None
        DEVICE, MANAGED or HOST_ACCESSIBLE memory of CUDA devices. A device without one uses its
        `gpumem.get_default_resource`, made at its first allocation.
    pinned : bool or MemoryResource, optional
        Whether pinned and mapped host arrays come from gpumem too, or the HOST_ACCESSIBLE resource
        for them. True, the default, means the default resource of the device's pinned memory.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        numba-cuda is not installed, is too old or simulates CUDA; Numba has made a context; or this
        is called inside a `using`.
    ConfigError, TypeError
        Numba cannot use a resource.

    Notes
    -----
    If memory is out, Numba's callers see an exception that is a ``CudaAPIError`` with the code
    CUDA_ERROR_OUT_OF_MEMORY and a `gpumem.OutOfMemoryError` with its report.

    If the driver has cuCtxRecordEvent (CUDA 12.5), a free waits for every stream. With an older
    driver it does not wait for streams made with the non-blocking flag: synchronise such a stream
    before you drop an array that it uses.

    ``cuda.managed_array`` and write-combined arrays still come from the driver. IPC handles are
    available for arenas with ``backing="regions"``. ``cuda.close()`` resets the device for the
    whole process, gpumem included: close your arenas first.
    """
    _switch.enable(_setting(resource, pinned))


def enable_pinned(resource: MemoryResource | None = None) -> None:
    """Let Numba allocate pinned and mapped arrays from gpumem, and leave device arrays as they are.

    Parameters
    ----------
    resource : MemoryResource, optional
        HOST_ACCESSIBLE memory of a CUDA device. None means the default resource of the device's
        pinned memory, which PyTorch and CuPy use, too, where their pinned memory comes from gpumem.
        Its limit is that of the arena: ``resource.set_limit("16GiB")``.

    Raises
    ------
    MissingFrameworkError, IntegrationError, ConfigError, TypeError
        As `enable`.
    """
    chosen = True if resource is None else resource
    _switch.enable(setting_with_pinned(Resources("Numba"), chosen, alone=True))


def disable() -> None:
    """Restore the memory manager that Numba had before the first `enable`.

    Does nothing if gpumem is not enabled.

    Raises
    ------
    IntegrationError
        Numba has made a context, which keeps its manager; or this is called inside a `using`.
    """
    _switch.disable()


def using(resource: ResourceLike = None, *, pinned: bool | MemoryResource | None = None) -> Using:
    """Do as `enable`, inside a ``with`` block.

    If Numba makes a context inside the block, that context keeps gpumem's memory. The end of the
    block then raises `gpumem.errors.IntegrationError`, and gpumem stays enabled.

    Raises
    ------
    ConfigError, TypeError
        Raised by this call: Numba cannot use a resource. Entering raises the others of `enable`.
    """
    return Using(_switch, _setting(resource, pinned))


def status() -> Status:
    """Return which memory Numba uses now."""
    return _switch.status()


def _setting(resource: ResourceLike, pinned: bool | MemoryResource | None) -> Setting:
    return setting_with_pinned(Resources("Numba", resource), pinned)


def __getattr__(name: str) -> Any:
    # Numba reads this attribute of the module that NUMBA_CUDA_MEMORY_MANAGER names.
    if name == "_numba_memory_manager":
        _require()
        return _manager_class(_setting(None, None))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require() -> Any:
    """Return Numba's driver module; the package is numba-cuda, whatever provides ``numba.cuda``."""
    import_framework("numba-cuda", "numba_cuda", _OLDEST, install=_INSTALL)
    from numba import cuda

    if not hasattr(cuda, "set_memory_manager"):
        raise IntegrationError(
            "Numba simulates CUDA (NUMBA_ENABLE_CUDASIM), and its simulator has no memory manager"
        )
    from numba.cuda.cudadrv import driver

    return driver


def _manager_class(setting: Setting) -> Any:
    from gpumem.integrations.numba._manager import manager_class

    resources = None if setting.option("alone") else setting.resources
    return manager_class(resources, setting.option("pinned"))


class _Numba(Framework):
    name = "Numba"

    def attach(self, setting: Setting) -> Any:
        driver = _require()
        require_gpu(self.name)
        reason = self.why_not_restorable()
        if reason is not None:
            raise IntegrationError(f"Numba cannot be switched to gpumem's memory: {reason}")
        before = driver._memory_manager
        driver.set_memory_manager(_manager_class(setting))
        return before

    def restore(self, before: Any) -> None:
        # set_memory_manager does not accept None, the value before the first context.
        _require()._memory_manager = before

    def why_not_restorable(self) -> str | None:
        devices = _require().driver.devices
        made = [number for number, each in devices.items() if each.primary_context is not None]
        if not made:
            return None
        return (
            f"it has made a context on device {', '.join(map(str, made))}, and a context keeps its "
            "memory manager"
        )


_switch = Switch(_Numba())

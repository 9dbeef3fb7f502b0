"""RAPIDS Memory Manager on gpumem's memory, and gpumem on RMM's memory.

The setting applies to the whole process, for each device, and can be changed at any time. RMM's
buffers keep the resource that allocated them. cuDF, cuML and all other users of RMM use it too, and
so do CuPy, Numba and PyTorch if they are configured to use RMM.

Examples
--------
>>> import gpumem
>>> import gpumem.integrations.rmm
>>> gpumem.integrations.rmm.enable(gpumem.Arena("cuda:0"))  # doctest: +SKIP
>>> import rmm  # doctest: +SKIP
>>> rmm.DeviceBuffer(size=1000)  # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from gpumem._arena.arena import Arena
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Stream
from gpumem._resource.pool import DriverPool
from gpumem.device import Device, MemoryInfo
from gpumem.integrations._common.callers import Blocks
from gpumem.integrations._common.places import PerDevice
from gpumem.integrations._common.resources import ResourceLike, Resources
from gpumem.integrations._common.switch import Setting, Status, Switch, Using
from gpumem.integrations._common.versions import import_framework
from gpumem.integrations.rmm import _native

__all__ = ["RmmStatus", "allocator", "disable", "enable", "resource", "status", "using"]
__dir__ = __all__.copy

_OLDEST = "25.2"
_INSTALL = "pip install rmm-cu13"


def enable(resource: ResourceLike = None) -> None:
    """Make gpumem RMM's resource of each device, from now on.

    RMM passes the stream of each allocation and of each free. RMM calls an `Arena` without the
    interpreter, through a C++ resource that is compiled at the first use, in seconds, against the
    installed librmm; `status` says whether it could be. Otherwise, and for other resources, RMM
    calls gpumem through a ``CallbackMemoryResource``, with the interpreter lock. A `DriverPool` is
    passed by its handle instead, and RMM then does not call gpumem.

    Parameters
    ----------
    resource : MemoryResource, several of them, a mapping by device, or None
        DEVICE, MANAGED or HOST_ACCESSIBLE memory of CUDA devices, for those devices. None means
        every device, each with its `gpumem.get_default_resource`, made at its first allocation,
        which is the last one to come through Python.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        RMM is not installed or too old, there is no usable CUDA device, or this is called inside a
        `using`.
    ConfigError, TypeError
        RMM cannot use a resource.

    Notes
    -----
    If memory is out, RMM calls its failure callbacks and then raises MemoryError with gpumem's
    report. RMM passes streams as bare handles: call ``resource.reset_stream`` with a stream before
    its owner destroys it.

    The compiled resource needs a C++20 compiler, librmm's headers, which its wheel has, and those
    of the CUDA runtime: a toolkit under CUDA_HOME, CUDA_PATH or /usr/local/cuda, or the wheels
    nvidia-cuda-runtime and nvidia-cuda-crt. A graph pool serves a stream that captures a graph.
    """
    _switch.enable(Setting(Resources("RMM", resource)))


def disable() -> None:
    """Restore the resource that each device had in RMM before the first `enable`.

    Raises
    ------
    IntegrationError
        This is called inside a `using`.
    """
    _switch.disable()


def using(resource: ResourceLike = None) -> Using:
    """Do as `enable`, inside a ``with`` block; its end restores the resources before it.

    Raises
    ------
    ConfigError, TypeError
        Raised by this call: RMM cannot use a resource. Entering raises the others of `enable`.
    """
    return Using(_switch, Setting(Resources("RMM", resource)))


@dataclass(frozen=True)
class RmmStatus(Status):
    """Which memory RMM uses now, and how it calls an arena.

    Attributes
    ----------
    enabled, resources
        As of `gpumem.integrations.Status`.
    calls : {"c++", "python"} or None
        How RMM calls an `Arena`: without the interpreter, or with its lock. None: gpumem is not
        enabled.
    why_python : str or None
        Why RMM has to call Python; None if it does not.
    """

    calls: str | None
    why_python: str | None


def status() -> RmmStatus:
    """Return which memory RMM uses now, and how it calls an arena."""
    now = _switch.status()
    if not now.enabled:
        return RmmStatus(False, now.resources, None, None)
    reason = _native.why_not()
    return RmmStatus(True, now.resources, "c++" if reason is None else "python", reason)


def allocator(resource: MemoryResource) -> Any:
    """Return an RMM resource over a gpumem resource.

    Parameters
    ----------
    resource : MemoryResource
        Lives as long as RMM's object. RMM calls an `Arena` as `enable` says, other resources from
        Python. A `DriverPool` is passed by its handle instead: RMM then calls the driver itself,
        and its blocks count in the driver's statistics of the pool, not in those of gpumem's own
        blocks.

    Returns
    -------
    rmm.mr.DeviceMemoryResource

    Raises
    ------
    MissingFrameworkError, IntegrationError
        RMM is not installed or too old.
    ConfigError, TypeError
        RMM cannot use the resource.
    ClosedError
        The pool is closed.
    """
    if not isinstance(resource, MemoryResource):
        raise TypeError(f"{resource!r} is not a gpumem.MemoryResource")
    resources = Resources("RMM", resource)
    _rmm()
    return _over(resources, resource.memory.device.index)


def resource(
    source: Any, *, memory: MemoryInfo | Device | str = "cuda:0", name: str | None = None
) -> MemoryResource:
    """Return a gpumem resource over an RMM resource.

    Parameters
    ----------
    source : rmm.mr.DeviceMemoryResource
    memory : MemoryInfo, Device or str
        The memory of its blocks, which RMM's resources cannot report.
    name : str, optional
        Name used in error messages and reports.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        RMM is not installed or too old.
    TypeError
        `source` is not a resource of RMM.
    """
    if not isinstance(source, _rmm().mr.DeviceMemoryResource):
        raise TypeError(f"{source!r} is not an rmm.mr.DeviceMemoryResource")
    return _FromRmm(source, memory, name)


# ---- RMM's side ----------------------------------------------------------------------------------


def _rmm() -> Any:
    return import_framework("RMM", "rmm", _OLDEST, install=_INSTALL)


class _FromRmm(MemoryResource):
    """A gpumem resource over RMM's."""

    def __init__(self, source: Any, memory: MemoryInfo | Device | str, name: str | None) -> None:
        super().__init__(memory, name=name)
        from rmm.pylibrmm.stream import Stream as RmmStream

        self._source = source
        self._stream_type = RmmStream

    def allocate_raw(self, nbytes: int, stream: Stream) -> int:
        return int(self._source.allocate(nbytes, self._stream_type(stream)))

    def deallocate_raw(self, ptr: int, nbytes: int, stream: Stream) -> None:
        self._source.deallocate(ptr, nbytes, self._stream_type(stream))


def _over(resources: Resources, index: int) -> Any:
    """Return an RMM resource over the gpumem resource of a device."""
    given = resources.given.get(index)
    if isinstance(given, DriverPool):
        return _pool_view(given)
    if _is_called_directly(given):
        return _native.resource_over(given)
    if given is not None:
        return _callbacks(Blocks(lambda: given))
    return _until_known(resources, index)


def _is_called_directly(given: MemoryResource | None) -> TypeGuard[Arena]:
    return isinstance(given, Arena) and _native.why_not() is None


def _callbacks(blocks: Blocks) -> Any:
    return _rmm().mr.CallbackMemoryResource(blocks.allocate, blocks.deallocate)


def _until_known(resources: Resources, index: int) -> Any:
    """Return callbacks over a default resource that is made at the first block.

    If RMM can call it directly, it does so from then on.
    """

    def find() -> MemoryResource:
        mr, found = _rmm().mr, resources.of(index)
        if _is_called_directly(found) and mr.get_per_device_resource(index) is source:
            mr.set_per_device_resource(index, _native.resource_over(found))
        return found

    source = _callbacks(Blocks(find))
    return source


def _pool_view(pool: DriverPool) -> Any:
    base: Any = _rmm().mr.CudaAsyncViewMemoryResource
    from cuda.bindings import driver

    # Objects of RMM's class cannot have attributes; those of a derived class can own the pool.
    view = type("PoolView", (base,), {})(driver.CUmemoryPool(pool.handle))
    view.pool = pool
    return view


class _Rmm(PerDevice):
    name = "RMM"

    def get(self, place: int) -> Any:
        return _rmm().mr.get_per_device_resource(place)

    def put(self, place: int, value: Any) -> None:
        _rmm().mr.set_per_device_resource(place, value)

    def over(self, resources: Resources, index: int) -> Any:
        return _over(resources, index)


_switch = Switch(_Rmm())

"""cuda.core's devices on gpumem's memory, and buffers in both directions without a copy.

cuda.core has a `Device` object for each thread, with its own memory resource. Therefore `enable`,
`disable` and `using` apply to the calling thread; each thread that allocates must call them.

`allocator` returns a ``cuda.core.MemoryResource`` over a gpumem resource of any memory, `resource`
a gpumem resource over a ``cuda.core.MemoryResource``. `buffer` returns a ``cuda.core.Buffer`` over
a `gpumem.Buffer`; `gpumem.from_dlpack` makes a tensor of a ``cuda.core.Buffer``.

Closing a ``cuda.core.Buffer`` frees its block even while NumPy or another library has a view of it,
as with cuda.core's own memory resources: cuda.core does not notify a resource of views. A buffer
that is dropped instead lives as long as its views. A block that `buffer` shows lives until its
`gpumem.Buffer` is closed, too.

Examples
--------
>>> import numpy as np
>>> import gpumem
>>> import gpumem.integrations.cuda_core
>>> source = gpumem.integrations.cuda_core.allocator(gpumem.Arena("host"))
>>> block = source.allocate(100, stream=None)
>>> np.from_dlpack(block).nbytes
100
>>> block.close()
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any, cast

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem.device import Device, MemoryInfo
from gpumem.integrations._common.places import PerDevice
from gpumem.integrations._common.resources import ResourceLike, Resources
from gpumem.integrations._common.switch import Setting, Status, Switch, Using
from gpumem.integrations._common.versions import import_framework

__all__ = ["allocator", "buffer", "disable", "enable", "resource", "status", "using"]
__dir__ = __all__.copy

_OLDEST = "0.5"
_INSTALL = "pip install cuda-core"


def enable(resource: ResourceLike = None) -> None:
    """Let ``cuda.core.Device.allocate`` allocate from gpumem on this thread.

    A block belongs to the stream of its allocation and is freed on the stream on which it is
    closed. While the stream captures a graph, blocks come from a graph pool.

    Parameters
    ----------
    resource : MemoryResource, several of them, a mapping by device, or None
        DEVICE, MANAGED or HOST_ACCESSIBLE memory of CUDA devices, for those devices. None means
        every device, each with its `gpumem.get_default_resource`, made at its first allocation.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        cuda.core is not installed or too old, there is no usable CUDA device, or this is called
        inside a `using`.
    ConfigError, TypeError
        cuda.core cannot use a resource.
    """
    _of_this_thread.switch.enable(Setting(Resources("cuda.core", resource)))


def disable() -> None:
    """Restore the memory resources that this thread's devices had before `enable`.

    Raises
    ------
    IntegrationError
        This is called inside a `using`.
    """
    _of_this_thread.switch.disable()


def using(resource: ResourceLike = None) -> Using:
    """Do as `enable`, inside a ``with`` block, for the thread that calls this.

    Raises
    ------
    ConfigError, TypeError
        Raised by this call: cuda.core cannot use a resource. Entering raises the others of
        `enable`.
    """
    return Using(_of_this_thread.switch, Setting(Resources("cuda.core", resource)))


def status() -> Status:
    """Return which memory the devices of the calling thread use."""
    return _of_this_thread.switch.status()


def allocator(resource: MemoryResource) -> Any:
    """Return a ``cuda.core.MemoryResource`` over a gpumem resource.

    Parameters
    ----------
    resource : MemoryResource
        Of any memory. For host memory no driver is needed and `stream` arguments are ignored.

    Returns
    -------
    cuda.core.MemoryResource
        Its `resource` is the gpumem resource.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        cuda.core is not installed or too old.
    TypeError
        `resource` is not a gpumem resource.
    """
    if not isinstance(resource, MemoryResource):
        raise TypeError(f"{resource!r} is not a gpumem.MemoryResource")
    return _parts().GpumemResource(resource.memory, lambda: resource)


def buffer(block: Buffer) -> Any:
    """Return a ``cuda.core.Buffer`` over a gpumem buffer's bytes, without a copy.

    The block lives until both are closed. Closing the ``cuda.core.Buffer`` does not free the block
    on its stream: order its work before the free of the gpumem buffer, or call
    `Buffer.record_stream`.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        cuda.core is not installed or too old.
    TypeError
        `block` is not a gpumem buffer.
    ClosedError
        `block` is closed.
    """
    if not isinstance(block, Buffer):
        raise TypeError(f"{block!r} is not a gpumem.Buffer")
    return _parts().GpumemBuffer(block).show()


def resource(
    source: Any, *, memory: MemoryInfo | Device | str | None = None, name: str | None = None
) -> MemoryResource:
    """Return a gpumem resource over a ``cuda.core.MemoryResource``.

    It can be used like any other resource: below an adaptor, in a session or as
    ``Arena(memory, source=...)``.

    Parameters
    ----------
    source : cuda.core.MemoryResource
    memory : MemoryInfo, Device or str, optional
        The memory of its blocks; None queries the source.
    name : str, optional
        Name used in error messages and reports.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        cuda.core is not installed or too old.
    TypeError
        `source` is not a ``cuda.core.MemoryResource``.
    ConfigError
        Its blocks are accessible from neither a device nor the host.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.integrations import cuda_core
    >>> theirs = cuda_core.allocator(gpumem.Arena("host"))
    >>> cuda_core.resource(theirs).allocate(100).nbytes
    100
    """
    core = _core()
    if not isinstance(source, core.MemoryResource):
        raise TypeError(f"{source!r} is not a cuda.core.MemoryResource")
    parts = _parts()
    found = parts.memory_of(source) if memory is None else memory
    return cast("MemoryResource", parts.ResourceOverCore(source, found, name))


# ---- cuda.core's side ----------------------------------------------------------------------------


def _core() -> Any:
    return import_framework("cuda.core", "cuda.core", _OLDEST, install=_INSTALL)


def _parts() -> ModuleType:
    _core()  # raises if it is missing or too old
    from gpumem.integrations.cuda_core import _classes

    return _classes


# ---- enable, disable, using ----------------------------------------------------------------------


class _CudaCore(PerDevice):
    name = "cuda.core"

    def get(self, place: int) -> Any:
        return _core().Device(place).memory_resource

    def put(self, place: int, value: Any) -> None:
        _core().Device(place).memory_resource = value

    def over(self, resources: Resources, index: int) -> Any:
        return _parts().GpumemResource(resources.memory_of(index), lambda: resources.of(index))


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.switch = Switch(_CudaCore())


_of_this_thread = _OfThread()

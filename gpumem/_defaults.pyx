"""The resource of a memory: made from its settings, and the default where a call names none."""

import os
import warnings
from contextlib import contextmanager
from contextvars import ContextVar

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF

from gpumem._arena cimport Arena
from gpumem._buffer cimport MemoryResource

from gpumem._resource.pool import DriverPool
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.device import default_device, MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, ConfigWarning, DriverError, PoolFallbackWarning


cdef extern from "Python.h":
    int PyContextVar_Get(object variable, PyObject* default, PyObject** value) except -1

cdef enum:
    MAX_LOOKUPS = 256

# In this context: the resources of the using_resource blocks that are open, the innermost last.
cdef tuple nothing_used = ()
_using = ContextVar("gpumem_using_resource", default=nothing_used)

# (device, kind) -> resource; the keys of arenas that were made here; and the resource for each
# object that callers have passed as a memory, None included.
cdef dict registered = {}
cdef set made_here = set()
cdef dict lookups = {}

# The last lookup, compared by identity: most callers pass the same object each time.
cdef object last_memory = None
cdef MemoryResource last_resource = None


cdef MemoryResource serving(object memory):
    """Return the default resource of a memory; None is the default device's memory."""
    cdef PyObject* value = NULL
    PyContextVar_Get(_using, NULL, &value)
    used = <object>value
    Py_DECREF(used)         # the cast took a reference of its own
    if used is not nothing_used:
        found = _used_for(used, memory)
        if found is not None:
            return <MemoryResource>found
    if memory is last_memory and last_resource is not None:
        return last_resource
    return look_up(memory)


cdef MemoryResource look_up(object memory):
    global last_memory, last_resource
    try:
        found = lookups.get(memory)
    except TypeError:       # not hashable: parsing refuses it below
        found = None
    if found is None:
        found = _registered_for(memory)
        if len(lookups) >= MAX_LOOKUPS:
            lookups.clear()
        lookups[memory] = found
    last_memory, last_resource = memory, found
    return last_resource


cdef void forget_lookups():
    global last_memory, last_resource
    lookups.clear()
    last_memory, last_resource = None, None


def _used_for(used, memory):
    if memory is None:
        return used[len(used) - 1]      # this file is compiled without wraparound
    key = _key_of(memory)
    return next((each for each in reversed(used) if _key_of(each.memory) == key), None)


def _registered_for(memory):
    key = _key_of(default_device() if memory is None else memory)
    found = registered.get(key)
    if found is not None:
        return found
    made = Arena(MemoryInfo(*key))
    if registered.setdefault(key, made) is made:    # else another thread was faster
        made_here.add(key)
    return registered[key]


def _key_of(memory):
    # Alignment and name play no part.
    info = MemoryInfo.parse(memory)
    return info.device, info.kind


def get_default_resource(memory=None):
    """Return the resource for allocations on `memory` without a resource of their own.

    It is the one of the innermost `using_resource` for this memory; else the one registered by
    `set_default_resource`; else an `Arena` with default settings, made at the first use and kept.

    Parameters
    ----------
    memory : MemoryInfo, Device or str, optional
        None is the memory of `default_device`, or of the innermost `using_resource`.

    Returns
    -------
    MemoryResource

    Raises
    ------
    ValueError, TypeError
        `memory` is not the name of a memory, or its device does not exist.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.get_default_resource("host") is gpumem.get_default_resource("host:0")
    True
    """
    return serving(memory)


def set_default_resource(memory, resource):
    """Set the default resource of a memory, in every thread and from now on.

    Buffers of the previous resource stay valid.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        The memory served; its alignment and name play no part.
    resource : MemoryResource or None
        A resource of that memory. None: an `Arena` with default settings, made at the next use.

    Raises
    ------
    ValueError
        The resource is of another memory.
    TypeError
        `resource` is not a MemoryResource.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.set_default_resource("host", gpumem.Arena("host", {"max_mem": 1 << 30}))
    >>> gpumem.set_default_resource("host", None)
    """
    key = _key_of(memory)
    if resource is not None:
        _require_resource(resource)
        if _key_of(resource.memory) != key:
            raise ValueError(f"{resource!r} is on {resource.memory}: it cannot serve "
                             f"{MemoryInfo(*key)}")
    made_here.discard(key)
    if resource is None:
        registered.pop(key, None)
    else:
        registered[key] = resource
    forget_lookups()


@contextmanager
def using_resource(resource):
    """Make a resource the default of its memory, inside a ``with`` block.

    It applies only to the context of this thread or asynchronous task. The innermost block of a
    memory counts; for allocations without a memory, the innermost block of all.

    Parameters
    ----------
    resource : MemoryResource

    Raises
    ------
    TypeError
        `resource` is not a MemoryResource.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.using_resource(gpumem.Arena("host")) as arena:
    ...     gpumem.empty(10, "float32").buffer.resource is arena
    True
    """
    _require_resource(resource)
    token = _using.set((*_using.get(), resource))
    try:
        yield resource
    finally:
        _using.reset(token)


def _require_resource(resource):
    if not isinstance(resource, MemoryResource):
        raise TypeError(f"{resource!r} is not a MemoryResource")


def _forget_the_parents():
    # Arenas are dead in a fork's child. Those made here are made again on demand; registered ones
    # stay, and raise ClosedError.
    for key in made_here:
        registered.pop(key, None)
    made_here.clear()
    forget_lookups()


os.register_at_fork(after_in_child=_forget_the_parents)


# ---- settings ------------------------------------------------------------------------------------

def resource_from_config(memory, config=None, **options):
    """Make the resource that `MemoryResource.from_config` describes, which has the `options`."""
    where = MemoryInfo.parse(memory)
    settings = ArenaConfig._given(config, {}, where)
    if not settings.use_cuda_mempool:
        return Arena(where, settings, **options)
    pool_settings = PoolConfig.from_arena(settings)
    if where.kind not in (MemoryKind.DEVICE, MemoryKind.HOST):
        raise ConfigError(
            f"invalid use_cuda_mempool = True for {where}: expected a device's own memory"
        )
    where.device._open()  # an unknown device is an error, not a device without pools
    capability = where.device.capabilities["memory_pools"]
    why = capability.reason
    if capability:
        try:
            pool = DriverPool(where, pool_settings, **options)
        except DriverError as error:
            if error.name != "CUDA_ERROR_NOT_SUPPORTED":
                raise
            why = str(error)
        else:
            _warn_of_idle_settings(where, settings)
            return pool
    warnings.warn(
        f"the driver has no memory pools for {where} ({why}): an arena is used instead",
        PoolFallbackWarning,            # compiled code has no frames: it names the caller's line
    )
    return Arena(where, settings._without_pool(), **options)


def _warn_of_idle_settings(memory, settings):
    for name in settings._without_effect_on_pool():
        warnings.warn(
            f"{name} = {getattr(settings, name)!r} has no effect on a driver's pool on {memory}: "
            "it applies to arenas",
            ConfigWarning,
        )

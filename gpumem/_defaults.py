"""The resource of a memory: made from its settings, and the default where a call names none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from gpumem._arena.arena import Arena
from gpumem._buffer.resource import MemoryResource
from gpumem._resource.pool import DriverPool
from gpumem._support.arguments import MISSING, refuse
from gpumem._support.contexts import ContextBlock, Link, Opened, opened_values
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.device import Device, MemoryInfo, MemoryKind, default_device
from gpumem.errors import ConfigError, ConfigWarning, DriverError, PoolFallbackWarning

_Key = tuple[Device, MemoryKind]
_R = TypeVar("_R", bound=MemoryResource)

MAX_LOOKUPS = 256

# In this context: the innermost using_resource block that is open.
using: ContextVar[Link | None] = ContextVar("gpumem_using_resource", default=None)

# (device, kind) -> resource; the keys of arenas that were made here; and the resource for each
# object that callers have passed as a memory, None included.
_registered: dict[_Key, MemoryResource] = {}
_made_here: set[_Key] = set()
_lookups: dict[object, MemoryResource] = {}

# The memory of the last lookup and its resource. `_tensor` compares the memory by identity, since
# most callers pass the same object each time. The first object is no memory.
last_served: list[Any] = [object(), None]


def get_default_resource(memory: MemoryInfo | Device | str | None = None) -> MemoryResource:
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
    used: list[MemoryResource] = opened_values(using)
    if used:
        if memory is None:
            return used[0]
        key = _key_of(memory)
        for each in used:
            if _key_of(each.memory) == key:
                return each
    return _look_up(memory)


def _look_up(memory: MemoryInfo | Device | str | None) -> MemoryResource:
    try:
        found = _lookups.get(memory)
    except TypeError:  # not hashable: parsing refuses it below
        found = None
    if found is None:
        found = _registered_for(memory)
        if len(_lookups) >= MAX_LOOKUPS:
            _lookups.clear()
        _lookups[memory] = found
    last_served[:] = memory, found
    return found


def _forget_lookups() -> None:
    _lookups.clear()
    last_served[:] = object(), None


def _registered_for(memory: MemoryInfo | Device | str | None) -> MemoryResource:
    key = _key_of(default_device() if memory is None else memory)
    found = _registered.get(key)
    if found is not None:
        return found
    made = Arena(MemoryInfo(*key))
    if _registered.setdefault(key, made) is made:  # else another thread was faster
        _made_here.add(key)
    return _registered[key]


def _key_of(memory: MemoryInfo | Device | str) -> _Key:
    # Alignment and name play no part.
    info = MemoryInfo.parse(memory)
    return info.device, info.kind


def set_default_resource(
    memory: MemoryInfo | Device | str | MemoryResource,
    resource: MemoryResource | None = MISSING,  # type: ignore[assignment]
) -> None:
    """Set the default resource of a memory, in every thread and from now on.

    Buffers of the previous resource stay valid.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        The memory served; its alignment and name play no part. May be left out: a resource alone
        serves its own memory.
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
    >>> gpumem.set_default_resource(gpumem.Arena("host", max_mem="1GiB"))
    >>> gpumem.set_default_resource("host", None)
    """
    if isinstance(memory, MemoryResource):
        if resource is not MISSING:
            refuse("memory", memory, "a memory, or a resource alone")
        resource, memory = memory, memory.memory
    elif resource is MISSING:
        raise TypeError(f"set_default_resource({memory!r}): resource is missing, such as an Arena")
    key = _key_of(memory)
    if resource is not None:
        _require_resource(resource)
        if _key_of(resource.memory) != key:
            raise ValueError(
                f"{resource!r} is on {resource.memory}: it cannot serve {MemoryInfo(*key)}"
            )
    _made_here.discard(key)
    if resource is None:
        _registered.pop(key, None)
    else:
        _registered[key] = resource
    _forget_lookups()


def using_resource(resource: _R) -> AbstractContextManager[_R]:
    """Make a resource the default of its memory, inside a ``with`` block.

    It applies only to the context of this thread or asynchronous task, as `observe.tag`. The
    innermost block of a memory applies; for allocations without a memory, the innermost block of
    all.

    Parameters
    ----------
    resource : MemoryResource

    Returns
    -------
    context manager
        It yields the resource. Also a decorator of functions. Each use needs another one.

    Raises
    ------
    TypeError
        `resource` is not a MemoryResource.
    GpumemError
        On entering: this one was entered before. On leaving: another thread or another context has
        entered.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.using_resource(gpumem.Arena("host")) as arena:
    ...     gpumem.empty(10, "float32").buffer.resource is arena
    True
    """
    _require_resource(resource)
    opened = Opened(resource)
    name = f"using_resource({resource!r})"
    return ContextBlock(using, opened, name, partial(using_resource, resource))


def _require_resource(resource: object) -> None:
    if not isinstance(resource, MemoryResource):
        raise TypeError(f"{resource!r} is not a MemoryResource")


def _forget_the_parents() -> None:
    # A fork's child cannot use arenas. Those made here are made again on demand; registered ones
    # stay, and raise ClosedError.
    for key in _made_here:
        _registered.pop(key, None)
    _made_here.clear()
    _forget_lookups()


os.register_at_fork(after_in_child=_forget_the_parents)


# ---- settings ------------------------------------------------------------------------------------


def resource_from_config(
    memory: MemoryInfo | Device | str,
    config: ArenaConfig | Mapping[str, object] | None = None,
    **options: Any,
) -> Arena | DriverPool:
    """Make the resource of `MemoryResource.from_config`, which has the `options`."""
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
        PoolFallbackWarning,
        stacklevel=2,
    )
    return Arena(where, settings._without_pool(), **options)


def _warn_of_idle_settings(memory: MemoryInfo, settings: ArenaConfig) -> None:
    for name in settings._without_effect_on_pool():
        warnings.warn(
            f"{name} = {getattr(settings, name)!r} has no effect on a driver's pool on {memory}: "
            "it applies to arenas",
            ConfigWarning,
            stacklevel=3,
        )

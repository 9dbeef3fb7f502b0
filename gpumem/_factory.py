"""The resource of a memory, made from its settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from gpumem._arena.arena import Arena
from gpumem._resource.pool import DriverPool
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, ConfigWarning, DriverError, PoolFallbackWarning

__all__ = ["resource_from_config"]

_NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"


def resource_from_config(
    memory: MemoryInfo | Device | str,
    config: ArenaConfig | Mapping[str, object] | None = None,
    **options: Any,
) -> Arena | DriverPool:
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
            if error.name != _NOT_SUPPORTED:
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

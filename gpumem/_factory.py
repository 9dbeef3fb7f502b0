"""Which resource serves a memory, by its settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpumem._core import Arena
from gpumem._resource.pool import DriverPool
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, DriverError, PoolFallbackWarning

if TYPE_CHECKING:
    from gpumem._budget import Budget, _Count
    from gpumem._buffer.stream import _StreamLike

__all__ = ["resource_from_config"]

_NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"


def resource_from_config(
    memory: MemoryInfo | Device | str,
    config: ArenaConfig | Mapping[str, object] | None = None,
    *,
    budget: Budget | None = None,
    count: _Count = "reserved",
    default_stream: _StreamLike = None,
    name: str | None = None,
) -> Arena | DriverPool:
    """Make the resource that `MemoryResource.from_config` describes."""
    common: dict[str, Any] = {
        "budget": budget,
        "count": count,
        "default_stream": default_stream,
        "name": name,
    }
    settings = config if isinstance(config, ArenaConfig) else ArenaConfig.from_mapping(config or {})
    where = MemoryInfo.parse(memory)
    if not settings.use_cuda_mempool:
        return Arena(where, settings, **common)
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
            return DriverPool(where, pool_settings, **common)
        except DriverError as error:
            if error.name != _NOT_SUPPORTED:
                raise
            why = str(error)
    warnings.warn(
        f"{where} has no driver's pools ({why}): an arena takes the place of the one asked for",
        PoolFallbackWarning,
        stacklevel=2,
    )
    return Arena(where, settings._without_pool(), **common)

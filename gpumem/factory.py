"""Which resource serves a memory, by its settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpumem._core import Arena
from gpumem._pool import DriverPool
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, DriverError, PoolFallbackWarning

if TYPE_CHECKING:
    from gpumem._budget import Budget, _Count
    from gpumem._stream import _StreamLike

__all__ = ["make_resource"]

_NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"


def make_resource(
    memory: MemoryInfo | Device | str,
    config: ArenaConfig | Mapping[str, object] | None = None,
    *,
    budget: Budget | None = None,
    count: _Count = "reserved",
    default_stream: _StreamLike = None,
    name: str | None = None,
) -> Arena | DriverPool:
    """Make the resource that the settings ask for: an arena, or the driver's pool.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        Where the bytes live.
    config : ArenaConfig or Mapping, optional
        Settings; a mapping is read by `ArenaConfig.from_mapping`. With ``use_cuda_mempool`` a
        `DriverPool` is made (see `PoolConfig.from_arena`).
    budget, count : optional
        What it charges, and for what: see `Arena` and `DriverPool`.
    default_stream : stream, optional
        Used where a call names none; None is the device's legacy default stream.
    name : str, optional
        For people.

    Returns
    -------
    Arena or DriverPool
        An arena also where a pool was asked for and the device has none: the other settings
        govern it, and a `PoolFallbackWarning` says why.

    Raises
    ------
    ConfigError
        A setting is not accepted, or would have no effect: the pool's without
        ``use_cuda_mempool``, or ``use_cuda_mempool`` for memory that is not a device's own.
    ValueError, DriverError
        As for `Arena` and `DriverPool`.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.make_resource("host", {"arena.use_cuda_mempool": "1"}) as resource:
    ...     resource.is_arena
    False
    """
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
            f"use_cuda_mempool = True is not accepted for {where}: it takes a device's own memory"
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

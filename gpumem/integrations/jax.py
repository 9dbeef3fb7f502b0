"""JAX beside gpumem: one pool of the driver or a bounded share, and arrays both ways by DLPack.

JAX has no hook for an allocator: XLA chooses among its own when it starts its devices, by
environment variables. So no `Arena` can serve JAX. What can be had:

- The driver's pool. With its ``cuda_async`` allocator XLA takes memory from the device's own pool,
  as `gpumem.DriverPool.default` does: what one gives back the other can have. `enable` asks for it.
- A share. ``enable(budget=...)`` lets XLA's own allocator take so much of the device at most, and
  only as it needs it, so that the rest is left for gpumem. `env` computes the variables alone.
- Arrays without a copy: ``jax.dlpack.from_dlpack(tensor)`` and ``gpumem.from_dlpack(array)``.

All of it is process-wide, and before JAX's first array or ``jax.devices()``; afterwards nothing
can be switched, there or back.

Examples
--------
>>> import gpumem.integrations.jax
>>> gpumem.integrations.jax.env(8 << 30, total_bytes=32 << 30)
{'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'XLA_CLIENT_MEM_FRACTION': '0.25'}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gpumem._buffer.resource import MemoryResource
from gpumem._resource.pool import DriverPool
from gpumem.device import Device
from gpumem.errors import ConfigError, IntegrationError
from gpumem.integrations._switch import Framework, Setting, Status, Switch, Using
from gpumem.integrations._versions import import_framework

__all__ = ["disable", "enable", "env", "status", "using"]

_OLDEST = "0.6"
_INSTALL = "pip install 'jax[cuda13]'"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses both at once
_NO_HOOK = "JAX has no hook for allocators; expected gpumem.DriverPool.default(device) or a budget"


def enable(resource: DriverPool | None = None, *, budget: float | None = None) -> None:
    """Let JAX share the driver's pool with gpumem, or keep to a budget, from its start on.

    Parameters
    ----------
    resource : DriverPool, optional
        The device's own pool, `gpumem.DriverPool.default`; None is that too, where no `budget` is
        given. Any other resource is refused, because JAX cannot use it.
    budget : int or float, optional
        Bytes of each device, or a part of it up to 1.0, that JAX's own allocator may take.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        JAX is not installed or too old, has started its devices, or cannot use the resource; inside
        a `using`.
    ConfigError
        A budget out of range, or together with a pool: XLA's allocator over a pool has no bound.
    """
    _switch.enable(_setting(resource, budget))


def disable() -> None:
    """Take back the environment variables that `enable` set.

    Raises
    ------
    IntegrationError
        JAX has started its devices, and keeps to them; or inside a `using`.
    """
    _switch.disable()


def using(resource: DriverPool | None = None, *, budget: float | None = None) -> Using:
    """Do as `enable`, inside a ``with`` block.

    If JAX starts its devices inside, leaving raises `gpumem.errors.IntegrationError`: JAX keeps to
    what it started with.

    Raises
    ------
    IntegrationError, ConfigError
        At once, for what JAX cannot use; the rest as `enable`, on entering.
    """
    return Using(_switch, _setting(resource, budget))


def status() -> Status:
    """Return which memory JAX uses now."""
    return _switch.status()


def env(
    budget: float | None = None,
    *,
    device: Device | str = "cuda:0",
    total_bytes: int | None = None,
) -> dict[str, str]:
    """Return the environment variables that bound JAX, for another process or a shell.

    Parameters
    ----------
    budget : int or float, optional
        Bytes, or a part of the device up to 1.0. None: no bound, but nothing ahead of need.
    device : Device or str
        Whose memory a number of bytes is a part of.
    total_bytes : int, optional
        What that device has; None asks it.

    Returns
    -------
    dict
        Strings by name. The part is rounded down to millionths, so that it is never above `budget`.

    Raises
    ------
    ConfigError
        A budget out of range.
    ValueError, DriverError
        The device is not there, or does not answer.

    Notes
    -----
    The context and what XLA compiles take memory besides. Subtract the budget from gpumem's:
    ``Arena(device, {"max_mem": total - budget})``.
    """
    variables = {_PREALLOCATE: "false"}
    if budget is not None:
        variables[_FRACTION] = _part(budget, device, total_bytes)
    return variables


def _part(budget: float, device: Device | str, total: int | None) -> str:
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ConfigError(f"invalid budget = {budget!r}: expected bytes, or a part up to 1.0")
    part = float(budget)
    if isinstance(budget, int):
        total = Device(device).total_bytes if total is None else total
        if not 0 < budget <= total:
            raise ConfigError(f"invalid budget = {budget}: expected 1 to {total} bytes of {device}")
        part = budget / total
    if not 0.000001 <= part <= 1.0:
        raise ConfigError(f"invalid budget = {budget!r}: expected a part from 0.000001 to 1.0")
    millionths = int(part * 1_000_000)
    return f"{millionths / 1_000_000:.6f}".rstrip("0").rstrip(".")


# ---- enable, disable, using ----------------------------------------------------------------------


def _setting(resource: Any, budget: float | None) -> Setting:
    if resource is not None:
        _require_own_pool(resource)
        if budget is not None:
            raise ConfigError(
                "budget cannot be combined with a pool: XLA's cuda_async has no bound"
            )
    shared = {_ALLOCATOR: "cuda_async", _PREALLOCATE: "false"}
    variables = shared if budget is None else env(budget)
    return Setting(resource, tuple(sorted(variables.items())))


def _require_own_pool(resource: Any) -> None:
    own = DriverPool.default(resource.memory.device) if isinstance(resource, DriverPool) else None
    if own is None or resource.handle != own.handle:
        raise IntegrationError(f"invalid resource = {resource!r}: {_NO_HOOK}")


class _Jax(Framework):
    name = "JAX"

    def resources_of(self, setting: Setting) -> Mapping[int, MemoryResource]:
        pool = setting.resources
        return {} if pool is None else {pool.memory.device.index: pool}

    def attach(self, setting: Setting) -> dict[str, str | None]:
        import_framework("JAX", "jax", _OLDEST, install=_INSTALL)
        reason = self.why_not_back()
        if reason is not None:
            raise IntegrationError(f"JAX cannot be switched: {reason}")
        after: dict[str, str | None] = dict(setting.options)
        if _FRACTION in after:
            after[_OLD_FRACTION] = None
        before = {name: os.environ.get(name) for name in after}
        _put(after)
        return before

    def replace(self, before: dict[str, str | None], setting: Setting) -> dict[str, str | None]:
        met = self.attach(setting)
        _put({name: value for name, value in before.items() if name not in met})
        return {name: before.get(name, value) for name, value in met.items()}

    def restore(self, before: dict[str, str | None]) -> None:
        _put(before)

    def why_not_back(self) -> str | None:
        from jax._src import xla_bridge

        if not xla_bridge.backends_are_initialized():
            return None
        return "it has started its devices, and reads its settings only then"


def _put(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_switch = Switch(_Jax())

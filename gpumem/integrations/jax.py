"""JAX next to gpumem: a shared pool of the driver or a memory limit, and DLPack in both directions.

JAX has no hook for allocators: when XLA starts its devices, it chooses one of its own allocators by
environment variables. Therefore an `Arena` cannot serve JAX. JAX and gpumem can share:

- The driver's pool. XLA's ``cuda_async`` allocator uses the device's default memory pool, the one
  of `gpumem.DriverPool.default`: memory that one side frees is available to the other. `enable`
  selects it.
- The device, with a limit. ``enable(budget=...)`` limits XLA's own allocator and turns off its
  preallocation, so that gpumem can use the rest. `env` only returns the environment variables.
- Arrays, without a copy: ``jax.dlpack.from_dlpack(tensor)`` and ``gpumem.from_dlpack(array)``.

The settings apply to the whole process. They must be made before JAX's first array or
``jax.devices()``; afterwards they can be neither made nor undone.

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
from gpumem._support.sizes import is_size_with_unit, parse_size
from gpumem.device import Device
from gpumem.errors import ConfigError, IntegrationError
from gpumem.integrations._common.places import Places
from gpumem.integrations._common.switch import Setting, Status, Switch, Using
from gpumem.integrations._common.versions import import_framework, require_gpu

__all__ = ["disable", "enable", "env", "status", "using"]
__dir__ = __all__.copy

_OLDEST = "0.6"
_INSTALL = "pip install 'jax[cuda13]'"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses both at once
_NO_HOOK = "JAX has no hook for allocators; expected gpumem.DriverPool.default(device) or a budget"


def enable(resource: DriverPool | None = None, *, budget: float | str | None = None) -> None:
    """Let JAX share the driver's pool with gpumem, or limit the memory of JAX.

    Parameters
    ----------
    resource : DriverPool, optional
        The device's default pool, `gpumem.DriverPool.default`; also None means this pool, unless
        `budget` is given. JAX cannot use other resources.
    budget : int, float or str, optional
        Limit of JAX's own allocator on each device: bytes, a size such as ``"8GiB"``, or a fraction
        of the device up to 1.0.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        JAX is not installed or too old, has started its devices, or cannot use the resource; or
        this is called inside a `using`.
    ConfigError
        `budget` is out of range, or is given together with a pool, which XLA cannot limit.
    """
    _switch.enable(_setting(resource, budget))


def disable() -> None:
    """Restore the environment variables that `enable` changed.

    Raises
    ------
    IntegrationError
        JAX has started its devices, and no longer reads its settings; or this is called inside a
        `using`.
    """
    _switch.disable()


def using(resource: DriverPool | None = None, *, budget: float | str | None = None) -> Using:
    """Do as `enable`, inside a ``with`` block.

    If JAX starts its devices inside the block, the end of the block raises
    `gpumem.errors.IntegrationError`, because JAX keeps the settings that it started with.

    Raises
    ------
    IntegrationError, ConfigError
        Raised by this call: JAX cannot use the arguments. Entering raises the others of `enable`.
    """
    return Using(_switch, _setting(resource, budget))


def status() -> Status:
    """Return which memory JAX uses now."""
    return _switch.status()


def env(
    budget: float | str | None = None,
    *,
    device: Device | str = "cuda:0",
    total_bytes: int | None = None,
) -> dict[str, str]:
    """Return the environment variables that limit JAX's memory, for another process or a shell.

    Parameters
    ----------
    budget : int, float or str, optional
        Bytes, a size such as ``"8GiB"``, or a fraction of the device up to 1.0. None: no limit, but
        no preallocation either.
    device : Device or str
        The device to which a number of bytes refers.
    total_bytes : int, optional
        Memory of that device; None queries the device.

    Returns
    -------
    dict
        Values by name. The fraction is rounded down to millionths, so that it never exceeds
        `budget`.

    Raises
    ------
    ConfigError
        `budget` is out of range.
    ValueError, DriverError
        The device does not exist, or the driver cannot query it.

    Notes
    -----
    The CUDA context and compiled programs need further memory. Subtract the budget from gpumem's
    limit:
    ``Arena(device, {"max_mem": total - budget})``.
    """
    variables = {_PREALLOCATE: "false"}
    if budget is not None:
        variables[_FRACTION] = _part(budget, device, total_bytes)
    return variables


def _part(budget: float | str, device: Device | str, total: int | None) -> str:
    if isinstance(budget, str) and is_size_with_unit(budget):
        budget = parse_size(budget)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ConfigError(
            f"invalid budget = {budget!r}: expected bytes, a size such as "
            '"8GiB", or a part up to 1.0'
        )
    part = float(budget)
    if isinstance(budget, int):
        total = Device(device).total_bytes if total is None else total
        if not 0 < budget <= total:
            raise ConfigError(
                f"invalid budget = {budget}: expected 1 to {total} bytes, all of {device}"
            )
        part = budget / total
    if not 0.000001 <= part <= 1.0:
        raise ConfigError(f"invalid budget = {budget!r}: expected a part from 0.000001 to 1.0")
    millionths = int(part * 1_000_000)
    return f"{millionths / 1_000_000:.6f}".rstrip("0").rstrip(".")


# ---- enable, disable, using ----------------------------------------------------------------------


def _setting(resource: Any, budget: float | str | None) -> Setting:
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


class _Jax(Places):
    name = "JAX"

    def resources_of(self, setting: Setting) -> Mapping[int, MemoryResource]:
        pool = setting.resources
        return {} if pool is None else {pool.memory.device.index: pool}

    def wanted(self, setting: Setting) -> dict[str, str | None]:
        import_framework("JAX", "jax", _OLDEST, install=_INSTALL)
        require_gpu(self.name)
        reason = self.why_not_restorable()
        if reason is not None:
            raise IntegrationError(f"JAX cannot be switched: {reason}")
        variables: dict[str, str | None] = dict(setting.options)
        if _FRACTION in variables:
            variables[_OLD_FRACTION] = None
        return variables

    def get(self, place: str) -> str | None:
        return os.environ.get(place)

    def put(self, place: str, value: str | None) -> None:
        if value is None:
            os.environ.pop(place, None)
        else:
            os.environ[place] = value

    def why_not_restorable(self) -> str | None:
        from jax._src import xla_bridge

        if not xla_bridge.backends_are_initialized():
            return None
        return "it has started its devices, and reads its settings only then"


_switch = Switch(_Jax())

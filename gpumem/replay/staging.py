"""Where replays run: settings of their arena, and a host device as large as a trace asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from gpumem.config import ArenaConfig
from gpumem.device import Device

# A replay touches no byte, so a host device may pretend to be larger than the machine.
_PRETENDED_CAPACITY = 1 << 46


def settings_of(config: ArenaConfig | Mapping[str, object] | None, max_mem: int) -> ArenaConfig:
    """Make a configuration of settings and, unless it is 0, a limit."""
    if isinstance(config, ArenaConfig):
        given = config.to_mapping()
    else:
        given = ArenaConfig.from_mapping(config or {}).to_mapping()
    if max_mem:
        given["arena.max_mem"] = max_mem  # type: ignore[assignment]
    return ArenaConfig.from_mapping(given)


@contextlib.contextmanager
def stage(device: Device, lag_us: int) -> Iterator[None]:
    """Make a host device large enough, and slow if asked; put it back after."""
    if device.type != "host":
        yield
        return
    from gpumem._native.driver import host as _host

    device._open()
    before = _host.capacity(device.index)
    _host.set_capacity(device.index, max(before, _PRETENDED_CAPACITY))
    _host.set_lag(lag_us * 1000)
    _host.use_virtual_clock(True)
    try:
        yield
    finally:
        _host.set_lag(0)
        _host.use_virtual_clock(False)
        _host.set_capacity(device.index, before)

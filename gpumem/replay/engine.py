"""Replay a trace on a real arena."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumem._arena.arena import Arena
from gpumem._buffer.stream import Stream
from gpumem._support.arguments import is_integer
from gpumem.config import ArenaConfig
from gpumem.device import Device, MemoryInfo, default_device
from gpumem.errors import ConfigError
from gpumem.replay._replay import run
from gpumem.replay.unfinished import peak_live_or_unfinished
from gpumem.traces import Trace, load_trace

MAX_LAG_US = (1 << 40) - 1


@dataclass(frozen=True)
class ReplayResult:
    """Memory and time of one replay.

    Attributes
    ----------
    device : str
        The device of the arena.
    events : int
        Events of the trace.
    peak_requested_bytes : int
        Peak of the live bytes, as requested by the program, failed allocations included.
    peak_live_or_unfinished_bytes : int
        Largest number of bytes live at once, or freed by a stream before its work on them finished:
        no other stream could use those. The same as peak_requested_bytes without lag.
    peak_in_use_bytes : int
        Peak of the bytes in use, padding included.
    peak_reserved_bytes : int
        Peak of the bytes reserved from the device.
    fragmentation : float
        peak_reserved_bytes divided by the peak of live bytes of allocations that did not fail: by
        peak_requested_bytes if none failed; 1.0 if nothing was allocated.
    ns_per_event : float
        Nanoseconds per allocation or completed free, driver calls included.
    failed_allocs : int
        Failed allocations.
    driver_calls : int
        Driver calls made on behalf of the arena.
    pages_moved : int
        Physical pages moved to another address.

    Examples
    --------
    >>> from gpumem.replay import replay
    >>> result = replay("multistream_train", "host")
    >>> result.peak_requested_bytes <= result.peak_in_use_bytes <= result.peak_reserved_bytes
    True
    """

    device: str
    events: int
    peak_requested_bytes: int
    peak_live_or_unfinished_bytes: int
    peak_in_use_bytes: int
    peak_reserved_bytes: int
    fragmentation: float
    ns_per_event: float
    failed_allocs: int
    driver_calls: int
    pages_moved: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        return asdict(self)


def replay(
    trace: Trace | str | Path,
    device: Device | str | None = None,
    *,
    config: ArenaConfig | Mapping[str, object] | None = None,
    max_mem: int = 0,
    lag_us: int = 0,
) -> ReplayResult:
    """Replay a trace on a fresh arena: allocate and free as the recorded program did.

    No memory is read or written, so on a host device any trace fits whatever the machine has.
    The loop runs without the interpreter. The time that moving pages may take is a share of the
    trace's own time, because a replay is faster than the program was.

    Parameters
    ----------
    trace : Trace, str or Path
        A trace, or an argument of `load_trace`.
    device : Device or str, optional
        Where to replay; the default device if None.
    config : ArenaConfig or Mapping, optional
        Settings of the arena; ``{"enable": False}`` sends every call to the driver.
    max_mem : int, optional
        Limit in bytes; 0 leaves the configuration's.
    lag_us : int, optional
        Microseconds of the trace's time by which every stream finishes its work later than it
        was enqueued. Host devices only.

    Returns
    -------
    ReplayResult

    Raises
    ------
    TraceError
        The trace cannot be read.
    ValueError
        Unknown device.
    ConfigError
        A setting, a negative limit, or a lag that is not from 0 to 2**40 - 1.

    Examples
    --------
    >>> from gpumem.replay import replay
    >>> result = replay("multistream_train", "host")
    >>> result.failed_allocs
    0
    """
    recorded = trace if isinstance(trace, Trace) else load_trace(trace)
    where = default_device() if device is None else Device(device)
    if not is_integer(lag_us, 0, MAX_LAG_US):
        raise ConfigError(f"invalid lag_us = {lag_us!r}: expected 0 to 2**40 - 1")
    if lag_us and where.type != "host":
        raise ConfigError(f"lag_us = {lag_us} needs a host device, not {where}")
    with opened(where, config, max_mem, lag_us) as arena:
        executed, failed, requested, served, nanoseconds = run_on(arena, recorded, bool(lag_us))
        stats = arena.stats()
    return ReplayResult(
        device=str(where),
        events=recorded.events,
        peak_requested_bytes=requested,
        peak_live_or_unfinished_bytes=(
            peak_live_or_unfinished(recorded, lag_us) if lag_us else requested
        ),
        peak_in_use_bytes=stats.max_in_use,
        peak_reserved_bytes=stats.max_reserved,
        fragmentation=stats.max_reserved / served if served else 1.0,
        ns_per_event=nanoseconds / executed if executed else 0.0,
        failed_allocs=failed,
        driver_calls=stats.driver_calls,
        pages_moved=stats.pages_moved,
    )


# ---- the arena and its device --------------------------------------------------------------------

# A replay does not access the memory, so the host device may be larger than the machine.
_PRETENDED_CAPACITY = 1 << 46


@contextlib.contextmanager
def opened(
    device: Device,
    config: ArenaConfig | Mapping[str, object] | None,
    max_mem: int = 0,
    lag_us: int = 0,
) -> Iterator[Arena]:
    """Open an arena for a replay; a host device becomes large enough and, with a lag, slow."""
    settings = ArenaConfig._given(config, {}, MemoryInfo(device))
    if max_mem:
        limited = {**settings.to_mapping(), "arena.max_mem": max_mem}
        settings = ArenaConfig.from_mapping(limited)
    with prepared(device, lag_us), Arena(device, settings) as arena:
        yield arena


@contextlib.contextmanager
def prepared(device: Device, lag_us: int = 0) -> Iterator[None]:
    """Make a host device large enough for a replay and, with a lag, slow; restore it at the end."""
    if device.type != "host":
        yield
        return
    from gpumem._native.driver import host

    device._open()
    before = host.capacity(device.index)
    host.set_capacity(device.index, max(before, _PRETENDED_CAPACITY))
    host.set_lag(lag_us * 1000)
    host.use_virtual_clock(True)
    try:
        yield
    finally:
        host.set_lag(0)
        host.use_virtual_clock(False)
        host.set_capacity(device.index, before)


def run_on(
    arena: Arena, trace: Trace, virtual_clock: bool = False
) -> tuple[int, int, int, int, int]:
    """Run a trace on a fresh arena; see `gpumem.replay._replay.run`."""
    streams = [Stream(arena.memory.device) for _ in range(trace.streams)]
    return run(arena, streams, trace, virtual_clock)

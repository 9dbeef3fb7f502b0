"""Replay recorded allocation traces on a real allocator.

`replay` runs a trace on an arena of any device and reports what it needed; ``policies`` models what
other allocators would reserve. Traces and their readers are in `gpumem.traces`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumem._buffer.stream import Stream
from gpumem._core import Arena
from gpumem.config import ArenaConfig
from gpumem.device import Device, default_device
from gpumem.errors import ConfigError
from gpumem.replay._replay import run
from gpumem.replay.staging import settings_of, stage
from gpumem.traces.formats import load_trace
from gpumem.traces.trace import Trace

__all__ = ["ReplayResult", "replay"]


@dataclass(frozen=True)
class ReplayResult:
    """What one replay needed.

    Attributes
    ----------
    device : str
        Where it ran.
    events : int
        Events of the trace.
    peak_requested_bytes : int
        The most that was live at once, as the program requested it.
    peak_in_use_bytes : int
        The most that was handed out at once, padding included.
    peak_reserved_bytes : int
        The most that was held from the device.
    fragmentation : float
        peak_reserved_bytes / peak_requested_bytes.
    ns_per_event : float
        Nanoseconds per allocation or completed free, driver calls included.
    failed_allocs : int
        Allocations that were refused.
    driver_calls : int
        Driver calls made on behalf of the arena.
    pages_moved : int
        Physical pages moved to another address.

    Examples
    --------
    >>> result = replay("multistream_train", "host")
    >>> result.peak_requested_bytes <= result.peak_in_use_bytes <= result.peak_reserved_bytes
    True
    """

    device: str
    events: int
    peak_requested_bytes: int
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
    The loop runs without the interpreter.

    Parameters
    ----------
    trace : Trace, str or Path
        A trace, or what `load_trace` takes.
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
        A setting, a negative limit or a negative lag.

    Examples
    --------
    >>> result = replay("multistream_train", "host")
    >>> result.failed_allocs
    0
    """
    recorded = trace if isinstance(trace, Trace) else load_trace(trace)
    where = default_device() if device is None else Device(device)
    settings = settings_of(config, max_mem)
    if isinstance(lag_us, bool) or not isinstance(lag_us, int) or not 0 <= lag_us < 1 << 40:
        raise ConfigError(f"invalid lag_us = {lag_us!r}: expected 0 to 2**40")
    if lag_us and where.type != "host":
        raise ConfigError(f"lag_us = {lag_us} needs a host device, not {where}")
    with stage(where, lag_us), Arena(where, settings) as arena:
        streams = [Stream(where) for _ in range(recorded.streams)]
        executed, failed, peak_requested, nanoseconds = run(
            arena,
            streams,
            recorded.action,
            recorded.block,
            recorded.size,
            recorded.stream,
            recorded.time_us,
            recorded.allocs,
            bool(lag_us),
        )
        stats = arena.stats()
    return ReplayResult(
        device=str(where),
        events=recorded.events,
        peak_requested_bytes=peak_requested,
        peak_in_use_bytes=stats.max_in_use,
        peak_reserved_bytes=stats.max_reserved,
        fragmentation=stats.max_reserved / peak_requested if peak_requested else 1.0,
        ns_per_event=nanoseconds / executed if executed else 0.0,
        failed_allocs=failed,
        driver_calls=stats.driver_calls,
        pages_moved=stats.pages_moved,
    )

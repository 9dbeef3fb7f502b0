"""The memory that each way to serve a trace reserves over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpumem._events import events
from gpumem._events.recorder import RecorderHandle
from gpumem._support.sizes import format_size
from gpumem.device import Device
from gpumem.errors import TraceError
from gpumem.replay.caching_model import caching_allocator_curve, plain_driver_curve
from gpumem.replay.engine import opened, run_on
from gpumem.traces import ALLOC, Curve, Segments, Trace
from gpumem.traces.builder import SegmentLog

PAGES = "gpumem, pages that move"
"""The name of the policy that is an arena's default on a device's own memory."""

_PLACED: dict[str, dict[str, object]] = {
    PAGES: {"backing": "virtual"},
    "gpumem, regions split tightly": {"backing": "regions", "split_rule": "tight"},
}
_MODELLED: dict[str, Callable[[Trace], Curve]] = {
    "PyTorch-like caching": caching_allocator_curve,
    "plain driver calls": plain_driver_curve,
}


@dataclass(frozen=True, eq=False)
class Policy:
    """One way to serve a trace, and the memory that it reserves from the device.

    Attributes
    ----------
    name : str
        Name used in error messages and reports.
    how : {"recorded", "replayed", "modelled"}
        From the log; from a replay on a real arena of the host; from a model.
    held : Curve
        Bytes held.
    fragmentation : float
        Peak of the reserved bytes divided by the peak of the live bytes; 1.0 for an empty trace.
    placement : BlockAddresses or None
        Addresses of the blocks, if the trace was replayed.
    """

    name: str
    how: str
    held: Curve
    fragmentation: float
    placement: BlockAddresses | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a plain dict."""
        return {
            "name": self.name,
            "how": self.how,
            "peak_reserved_bytes": self.held.peak,
            "fragmentation": self.fragmentation,
        }


def policies(trace: Trace) -> Iterator[Policy]:
    """Serve a trace in every way, one after the other: pages, regions, caching, plain calls.

    Raises
    ------
    TraceError
        More is live at once than an arena of the host can place.
    InUseError
        Every resource of the process is being recorded already, so a replay cannot be recorded.

    Examples
    --------
    >>> trace = Trace(action=[0, 0], block=[0, 1], size=[100, 3 << 20], stream=[0, 0],
    ...               time_us=[0, 1])
    >>> [(policy.name, policy.held.peak >> 20) for policy in policies(trace)][2:]
    [('PyTorch-like caching', 22), ('plain driver calls', 6)]
    """
    for name, config in _PLACED.items():
        placement = place(trace, config)
        yield policy(trace, name, "replayed", placement.held, placement)
    for name, model in _MODELLED.items():
        yield policy(trace, name, "modelled", model(trace))


def policy(
    trace: Trace, name: str, how: str, held: Curve, placement: BlockAddresses | None = None
) -> Policy:
    """Make a `Policy` from the curve of its reserved bytes."""
    live = trace.peak_requested
    return Policy(name, how, held, held.peak / live if live else 1.0, placement)


# ---- where an arena places the blocks ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BlockAddresses:
    """Addresses of the blocks of a replay, and the memory that it reserved.

    Attributes
    ----------
    address : ndarray of uint64, shape (allocs,)
        In the order of the allocations; 0 for empty blocks.
    held : Curve
        Bytes held from the device.
    segments : Segments or None
        Addresses of that memory; a page that moved is in both places.
    """

    address: NDArray[np.uint64]
    held: Curve
    segments: Segments | None


def place(trace: Trace, config: Mapping[str, object] | None = None) -> BlockAddresses:
    """Replay a trace on a fresh arena of the host and record it.

    No memory is read or written, so a trace of any machine fits.

    Parameters
    ----------
    trace : Trace
        The trace to replay.
    config : Mapping, optional
        Settings of the arena.

    Raises
    ------
    TraceError
        An allocation failed: more is live at once than the host has addresses or mappings for.
    InUseError
        Every resource of the process is being recorded already.

    Examples
    --------
    >>> trace = Trace(action=[0, 0], block=[0, 1], size=[256, 256], stream=[0, 0], time_us=[0, 1])
    >>> first, second = place(trace).address.tolist()
    >>> second - first
    256
    """
    slots = 1 << (4 * trace.events).bit_length()  # with those of memory and pages
    while True:
        recorder = RecorderHandle(slots, -1, 0)
        with opened(Device("host"), config) as arena:
            recorder.begin([arena])
            try:
                run_on(arena, trace)
            finally:
                recorder.end()
        if not recorder.lost:
            break
        slots *= 4
    rows = np.zeros((slots, 6), np.uint64)
    found = events.slots_of(rows[: recorder.read_ring(rows)])
    return _placement(trace, events.events_of(found, {}, began=0, process=0).records)


def _placement(trace: Trace, records: NDArray[np.void]) -> BlockAddresses:
    """Match recorded events with those of the trace, in order."""
    kind = records["kind"]
    moving = trace.moving()
    if failed := np.count_nonzero(kind == events.FAILURE):
        live = format_size(trace.peak_requested)
        blocks = f"{failed} of {trace.allocs} blocks"
        raise TraceError(f"the replay could not allocate {blocks}: the trace needs {live} at once")
    address = np.zeros(trace.allocs, np.uint64)
    filled = trace.size[trace.action == ALLOC] > 0
    address[filled] = records["address"][kind == events.ALLOC]

    # Memory is reserved and released before the event that causes it is recorded. Changes after
    # the last event come from the end of the replay.
    events_before = np.cumsum(kind <= events.FAILURE, dtype=np.int64)
    change = np.flatnonzero((kind == events.RESERVE) | (kind == events.RELEASE))
    change = change[events_before[change] < moving.size]
    sign = np.where(kind[change] == events.RESERVE, 1, -1)
    held = np.cumsum(sign * records["nbytes"][change].astype(np.int64))
    segments = _segments(records, moving, events_before)
    return BlockAddresses(address, Curve(moving[events_before[change]], held), segments)


def _segments(
    records: NDArray[np.void], moving: NDArray[np.int64], events_before: NDArray[np.int64]
) -> Segments | None:
    kind = records["kind"]
    memory = np.isin(kind, (events.RESERVE, events.RELEASE, events.MOVE))
    memory &= events_before < moving.size
    log = SegmentLog()
    rows = records[memory][["kind", "address", "nbytes"]].tolist()
    for (what, address, nbytes), at in zip(rows, events_before[memory].tolist(), strict=True):
        change = log.end if what == events.RELEASE else log.begin
        change(address, nbytes, int(moving[at]))
    return log.columns()

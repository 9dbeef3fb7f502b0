"""What recorded programs need and cost on an arena: bytes reserved, nanoseconds per event."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpumem
from gpumem.replay import replay
from gpumem.traces import Trace, load_trace, samples

REPEATS = 5
MOVE_US = 45


def replays(traces: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Replay the bundled traces and any given ones on every kind of device present.

    Nanoseconds are the median of five replays; bytes are the same in all of them.
    """
    recorded = [load_trace(name) for name in samples()]
    recorded += [load_trace(path) for path in traces if path.stem not in samples()]
    kinds = ["host:0"] + (["cuda:0"] if gpumem.driver_status().available else [])
    return [
        _replayed(trace, device, backing)
        for trace in recorded
        for device in kinds
        for backing in ("regions", "virtual")
    ]


def _replayed(trace: Trace, device: str, backing: str) -> dict[str, Any]:
    config = {"backing": backing, "split_rule": "tight"}
    results = [replay(trace, device, config=config) for _ in range(REPEATS)]
    row = results[0].as_dict()
    row["trace"] = trace.name
    row["backing"] = backing
    # What moving costs as a share of the recorded run: 45 us for a handle mapped anew.
    row["moving_share"] = results[0].pages_moved * MOVE_US / max(1, trace.duration_us)
    row["ns_per_event"] = statistics.median(result.ns_per_event for result in results)
    return row

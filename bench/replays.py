"""Memory and time of recorded programs on an arena: bytes reserved, nanoseconds per event.

Over pages, the driver calls of a replay are made again by themselves: the same calls, in the same
order, of the same sizes, at the same places. The time above 1.15 times that is the
arena's own.

``python -m bench.replays`` measures replays alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import gpumem
from bench import native
from gpumem._testing.arenas import release_retired
from gpumem.replay import engine, replay
from gpumem.traces import Trace, load_trace, samples

REPEATS = 5
MOVE_US = 45
CALLS = 1.15  # times the same calls made bare, which the goal of nanoseconds leaves out
BACKINGS = ("regions", "virtual")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.replays", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--traces", type=Path, help="folder of further .npz traces to replay")
    parser.add_argument("--device", action="append", help="such as cuda:0; default: all kinds")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each replay, at least 5")
    chosen = parser.parse_args(arguments)
    traces = sorted(chosen.traces.glob("*.npz")) if chosen.traces else []
    rows = replays(traces, chosen.device, chosen.repeats)
    if chosen.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    else:
        show(rows, Console(width=140))
    return 0


def replays(
    traces: Iterable[Path] = (), devices: Iterable[str] | None = None, repeats: int = REPEATS
) -> list[dict[str, Any]]:
    """Replay the bundled traces and any given ones on every kind of device present.

    Nanoseconds are medians of `repeats` replays, each with its driver calls made bare right after
    it; bytes are the same in all of them.
    """
    recorded = [load_trace(name) for name in samples()]
    recorded += [load_trace(path) for path in traces if path.stem not in samples()]
    kinds = devices or ["host:0"] + (["cuda:0"] if gpumem.driver_status().available else [])
    return [
        _replayed(trace, device, backing, repeats)
        for trace in recorded
        for device in kinds
        for backing in BACKINGS
    ]


def show(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print a table."""
    table = Table(title="replays (medians)")
    for column in ("trace", "device", "backing"):
        table.add_column(column)
    numbers = ("peak requested", "reserved / it", "ns/event", "calls bare", "above them")
    for column in (*numbers, "moved", "moving"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["trace"],
            row["device"],
            row["backing"],
            f"{row['peak_requested_bytes'] / 1e9:.2f} GB",
            f"{row['fragmentation']:.4f}",
            f"{row['ns_per_event']:.0f}",
            f"{row['bare_ns_per_event']:.0f}" if "bare_ns_per_event" in row else "",
            f"{row['beyond_calls_ns']:.0f}" if "beyond_calls_ns" in row else "",
            str(row["pages_moved"]),
            f"{100 * row['moving_share']:.2f} %",
        )
    console.print(table)


def _replayed(trace: Trace, device: str, backing: str, repeats: int) -> dict[str, Any]:
    config = {"backing": backing, "split_rule": "tight"}
    calls = DriverCalls(trace, device, config) if backing == "virtual" else None
    results, bare = [], []
    for _ in range(repeats):
        results.append(replay(trace, device, config=config))
        if calls is not None:
            bare.append(calls.nanoseconds() / calls.executed)
    row = results[0].as_dict()
    row["trace"] = trace.name
    row["backing"] = backing
    # Moving is a share of the recorded run: 45 us for a handle mapped anew.
    row["moving_share"] = results[0].pages_moved * MOVE_US / max(1, trace.duration_us)
    row["ns_per_event"] = statistics.median(result.ns_per_event for result in results)
    if calls is not None:
        row["bare_ns_per_event"] = statistics.median(bare)
        row["beyond_calls_ns"] = statistics.median(
            result.ns_per_event - CALLS * other for result, other in zip(results, bare, strict=True)
        )
    return row


class DriverCalls:
    """The calls of virtual memory that one replay makes, which can be made again."""

    def __init__(self, trace: Trace, device: str, config: Mapping[str, object]) -> None:
        self.device = gpumem.Device(device)
        self.record = _bare().Record(self.device._open())
        # Earlier arenas release their memory before the record, this one inside it.
        gc.collect()
        release_retired()
        with self.record:
            self._replay(trace, config)
            release_retired()

    def _replay(self, trace: Trace, config: Mapping[str, object]) -> None:
        with engine.opened(self.device, config) as arena:
            self.first = len(self.record)
            self.executed, *_ = engine.run_on(arena, trace)
            self.last = len(self.record)

    def nanoseconds(self) -> float:
        """Return the time of the calls that the replay's events made."""
        with engine.prepared(self.device):
            return float(self.record.repeat(self.first, self.last))


@functools.cache
def _bare() -> Any:
    """Load the module once: it looks whether it is out of date."""
    return native.load("_bare")


if __name__ == "__main__":
    sys.exit(main())

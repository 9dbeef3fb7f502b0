"""The cost of observation: events, snapshots, waits of other threads, a debug heap."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import gpumem
from gpumem import observe

PAIRS = 50_000  # of one timed run
ROUNDS = 11
LIVE = 100_000
SNAPSHOTS = 9
STACKS = (0.0, 0.01, 1.0)
DEPTH = 40  # frames of a deep stack
ENTERED = (2, 20)  # of them, anew for each block
DEBUGGED = (4 << 10, 1 << 20)  # bytes of a block
DEBUG_PAIRS = 200
GOAL_EVENT_NS = 100
GOAL_HELD_MS = 10


def observed(rounds: int = ROUNDS, live: int = LIVE) -> dict[str, Any]:
    """Measure everything here and now; plain values."""
    return {
        "events": events(rounds),
        "stacks": {entered: deep_stack(entered, rounds) for entered in ENTERED},
        "snapshots": {backing: snapshots(backing, live) for backing in ("regions", "virtual")},
        "debug": {size: debugged(size, rounds) for size in DEBUGGED},
    }


def events(rounds: int) -> dict[str, float]:
    """Nanoseconds that one event adds, by where it goes; medians of interleaved rounds."""
    arena = gpumem.Arena("host")
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        for _ in range(rounds):
            plain = _pair_ns(arena)
            for name, into in (("ring", None), ("file", path)):
                for stacks in STACKS:
                    with observe.record(arena, into, stacks=stacks):
                        added = (_pair_ns(arena) - plain) / 2
                    samples.setdefault(f"{name}, stacks {stacks:g}", []).append(added)
    return {name: statistics.median(values) for name, values in samples.items()}


def deep_stack(entered: int, rounds: int) -> float:
    """Nanoseconds that a stack adds to a block that is recorded; median.

    It is the same stack each time, of functions of different code.
    """
    with gpumem.Arena("host") as arena:
        block = _tower(entered - 1, lambda _: arena.allocate(4096))

        def blocks(count: int) -> None:
            for _ in range(count):
                block(0)

        def block_ns(stacks: bool) -> float:
            with observe.record(arena, stacks=stacks):
                begin = time.perf_counter_ns()
                all_blocks(PAIRS)
                return (time.perf_counter_ns() - begin) / PAIRS

        all_blocks = _tower(DEPTH - 1 - entered, blocks)
        return statistics.median(block_ns(True) - block_ns(False) for _ in range(rounds))


def snapshots(backing: str, live: int) -> dict[str, float]:
    """Milliseconds that a snapshot of `live` blocks takes, and for which it stops other threads."""
    rng = random.Random(1)
    with gpumem.Arena("host", {"backing": backing}) as arena:
        blocks = [arena.allocate(rng.randrange(1, 4096)) for _ in range(2 * live)]
        rng.shuffle(blocks)
        del blocks[live:]
        worst = _Worst(arena)
        held, took = [], []
        for _ in range(SNAPSHOTS):
            begin = time.perf_counter()
            taken = arena.snapshot()
            took.append((time.perf_counter() - begin) * 1e3)
            held.append(taken.held / 1e6)
            time.sleep(0.01)
        figures = {
            "live": len(blocks),
            "took_ms": statistics.median(took),
            "held_ms": statistics.median(held),
            "least_held_ms": min(held),
            "longest_held_ms": max(held),
            "longest_call_of_another_thread_ms": worst.end(),
            "json_ms": _milliseconds(taken.to_json),
        }
        blocks.clear()
    return figures


def debugged(nbytes: int, rounds: int) -> dict[str, float]:
    """Microseconds of a block and its free with and without a debug heap; medians."""
    candidates = {
        "without": gpumem.Arena("host"),
        "debug": gpumem.Arena("host", debug_heap=True),
        "without stacks": gpumem.Arena("host", debug_heap={"stack_depth": 0}),
        "pinned": gpumem.Arena("host/host_accessible", debug_heap=True),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, arena in candidates.items():
            times[name].append(_pair_ns(arena, nbytes, DEBUG_PAIRS) / 1e3)
    for arena in candidates.values():
        arena.close()
    return {name: statistics.median(found) for name, found in times.items()}


class _Worst:
    """A thread that allocates all the time, and remembers its longest call."""

    def __init__(self, arena: gpumem.Arena) -> None:
        self._arena = arena
        self._ended = threading.Event()
        self._longest = 0
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        clock = time.perf_counter_ns
        while not self._ended.is_set():
            begin = clock()
            self._arena.allocate(1000).close()
            self._longest = max(self._longest, clock() - begin)

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self._longest / 1e6


def _pair_ns(arena: gpumem.Arena, nbytes: int = 4096, pairs: int = PAIRS) -> float:
    allocate = arena.allocate
    begin = time.perf_counter_ns()
    for _ in range(pairs):
        allocate(nbytes)
    return (time.perf_counter_ns() - begin) / pairs


def _tower(height: int, innermost: Callable[[int], object]) -> Callable[[int], object]:
    """Return a function that calls another through `height` functions of different code."""
    for level in range(height):
        names: dict[str, Any] = {"inner": innermost}
        exec(compile("def floor(n): return inner(n)", f"/a folder/floor{level}.py", "exec"), names)
        innermost = names["floor"]
    return innermost


def _milliseconds(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.observe", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    report = observed()
    if parser.parse_args(arguments).json:
        json.dump(report, sys.stdout, indent=1)
        print()
        return 0
    table = Table(title=f"one event adds (goal: {GOAL_EVENT_NS} ns without stacks)")
    table.add_column("into")
    table.add_column("ns", justify="right")
    for name, ns in report["events"].items():
        table.add_row(name, f"{ns:.0f}")
    for entered, ns in report["stacks"].items():
        table.add_row(f"ring, stack of {DEPTH} frames, {entered} of them new", f"{ns:.0f}")
    Console().print(table)
    table = Table(title=f"a snapshot (goal: held for {GOAL_HELD_MS} ms at most)")
    table.add_column("")
    for backing in report["snapshots"]:
        table.add_column(backing, justify="right")
    for row in report["snapshots"]["regions"]:
        table.add_row(row, *(f"{found[row]:.4g}" for found in report["snapshots"].values()))
    Console().print(table)
    table = Table(title="a block and its free with a debug heap, us")
    table.add_column("")
    for nbytes in report["debug"]:
        table.add_column(f"{nbytes} bytes", justify="right")
    for row in report["debug"][DEBUGGED[0]]:
        table.add_row(row, *(f"{found[row]:.3g}" for found in report["debug"].values()))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One allocation and its free below Python, compared with allocators written for this.

Measures in a process of its own: one malloc wants room for its threads' data that only a new
process has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import gpumem
from bench import native
from bench.harness import ratios_within_rounds
from bench.native import mallocs
from gpumem._testing import host_device

TIB = 1 << 40
MOST_RANDOM_MALLOCS = 10_000  # live blocks
ROUNDS = 7
PAIRS = 100_000  # of one timed run
LATENCIES = 400_000
REPEATED_SIZES = 48
STEP = np.dtype([("size", np.uint64), ("slot", np.uint64)])
REFERENCE = "gpumem"
HOOK, C = "a hook: by address", "gpumem.h"
BINNED, BEST = "21 bins of sets, ort split", "one set, best fit"
BITMAPS = "two levels of bitmaps, any fit"

# (kind of sizes, live blocks): the goal of the ratio to each baseline.
GOALS: dict[tuple[str, int], dict[str, float]] = {
    ("random", 1_000): {BINNED: 1.5, BEST: 4.0},
    ("random", 10_000): {BINNED: 1.8, BEST: 4.0},
    ("random", 100_000): {BINNED: 2.3, BEST: 4.0},
    ("repeated", 10_000): {"gpumem, random": 3.0},
}
GOAL_P999_NS = 1000
GOAL_TWO_THREADS = 1.5
GOAL_METADATA = 64
GOAL_C_RATIO, GOAL_C_NS = 1.1, 40  # to the hook below it


def pairs() -> dict[str, Any]:
    """Measure in a new process; returns its report."""
    done = subprocess.run(
        [sys.executable, "-c", "from bench.pairs import *; json.dump(measure(), sys.stdout)"],
        env={**os.environ, "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=16384"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def measure() -> dict[str, Any]:
    """Measure everything here and now."""
    module = native.load()
    libraries, absent = mallocs.present()
    with _roomy_host():
        return {
            "absent": absent,
            "pairs": [
                _pairs(module, kind, live, _affordable(libraries, kind, live))
                for kind in ("random", "repeated")
                for live in (1_000, 10_000, 100_000)
            ],
            "latency": [_latency(module, kind, 100_000) for kind in ("random", "repeated")],
            "threads": _threads(module, libraries),
            "c_functions": [_c_functions(module, live) for live in (1_000, 10_000)],
            "handoff": _handoff(module, libraries),
            "metadata": _metadata(module, 100_000),
        }


# ---- programs ------------------------------------------------------------------------------------


def steps(kind: str, live: int, count: int, seed: int) -> np.ndarray:
    """Make a program: fill `live` slots, then replace random ones.

    Sizes are log-uniform: each anew from 512 bytes to 4 MiB, or 48 repeated ones up to 64 KiB.
    """
    rng = np.random.default_rng(seed)
    if kind == "random":
        sizes = 2 ** rng.uniform(9, 22, live + count)
    else:
        sizes = rng.choice(2 ** rng.uniform(9, 16, REPEATED_SIZES), live + count)
    made = np.empty(live + count, STEP)
    made["size"] = sizes.astype(np.uint64)
    made["slot"] = np.concatenate([np.arange(live), rng.integers(0, live, count)])
    return made


@contextlib.contextmanager
def _roomy_host() -> Iterator[None]:
    """Let the host device return addresses for more memory than the machine has."""
    gpumem.Device("host")._open()
    before = host_device.capacity(0)
    host_device.set_capacity(0, 8 * TIB)
    try:
        yield
    finally:
        host_device.set_capacity(0, before)


def _affordable(libraries: list[Any], kind: str, live: int) -> list[Any]:
    """Leave mallocs out where they might touch too much memory.

    They write into freed blocks, and one byte may cost a huge page.
    """
    return libraries if kind == "repeated" or live <= MOST_RANDOM_MALLOCS else []


def _core(module: Any, live: int, backing: str) -> Any:
    arena = gpumem.Arena("host", {"backing": backing, "split_rule": "tight"})
    return module.core(live, arena, [gpumem.Stream("host") for _ in range(2)])


def _subjects(module: Any, kind: str, live: int, libraries: list[Any]) -> dict[str, Any]:
    made = {
        "nothing": module.nothing(live),
        REFERENCE: _core(module, live, "regions"),
        "gpumem, virtual": _core(module, live, "virtual"),
        BINNED: module.binned_sets(live, TIB),
        BEST: module.best_fit(live, TIB),
        BITMAPS: module.bitmap_bins(live, TIB),
    }
    for library in libraries:
        made[library.name] = module.c_library(live, library.malloc, library.free)
    return made


# ---- measurements --------------------------------------------------------------------------------


def _pairs(module: Any, kind: str, live: int, libraries: list[Any]) -> dict[str, Any]:
    """Time pairs of every allocator in turn; net nanoseconds, ratios to gpumem within a round."""
    program = {name: kind for name in _subjects(module, kind, 1, libraries)}
    subjects = _subjects(module, kind, live, libraries)
    if ("repeated", live) == (kind, live) and (kind, live) in GOALS:
        subjects["gpumem, random"] = _core(module, live, "regions")
        program["gpumem, random"] = "random"
    for name, subject in subjects.items():
        subject.pairs(steps(program[name], live, 3 * live, seed=1))
    runs = {
        name: [steps(of, live, PAIRS, seed)[live:] for seed in range(2, 2 + ROUNDS)]
        for name, of in program.items()
    }
    samples = _interleaved({name: _timed_pairs(subjects[name], runs[name]) for name in subjects})
    return {
        "sizes": kind,
        "live": live,
        "nanoseconds": {name: statistics.median(values) for name, values in samples.items()},
        "ratios": ratios_within_rounds(samples, REFERENCE),
        "goals": GOALS.get((kind, live), {}),
        "rounds": ROUNDS,
    }


def _timed_pairs(subject: Any, runs: list[np.ndarray]) -> Callable[[int], float]:
    return lambda number: subject.pairs(runs[number]) / PAIRS


def _interleaved(timed: Mapping[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Run every candidate once in each round, less the cost of the loop in that round."""
    samples: dict[str, list[float]] = {name: [] for name in timed if name != "nothing"}
    for number in range(ROUNDS):
        loop = timed["nothing"](number) if "nothing" in timed else 0.0
        for name, values in samples.items():
            values.append(timed[name](number) - loop)
    return samples


def _latency(module: Any, kind: str, live: int) -> dict[str, Any]:
    """Stamp every single operation, after growth has ended; percentiles in nanoseconds."""
    subject = _core(module, live, "regions")
    subject.pairs(steps(kind, live, 3 * live, seed=1))
    rounds: list[dict[str, float]] = []
    for number in range(5):
        frees, allocations = subject.latencies(steps(kind, live, LATENCIES, 2 + number)[live:])
        both = np.concatenate([frees, allocations])
        rounds.append(
            {f"p{share:g}": float(np.percentile(both, share)) for share in (50, 99, 99.9, 99.99)}
            | {"p99.9 free": float(np.percentile(frees, 99.9))}
            | {"p99.9 allocate": float(np.percentile(allocations, 99.9))}
        )
    middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    return {"sizes": kind, "live": live, "nanoseconds": middle, "goal_p99.9": GOAL_P999_NS}


def _threads(module: Any, libraries: list[Any], live: int = 2_000) -> dict[str, Any]:
    """Let one thread, then two on their own streams, replace blocks; nanoseconds per thread.

    `apart` is of two threads that have an allocator each and share nothing but the machine, which
    may run two threads slower than one.
    """
    subjects = _subjects(module, "repeated", live, libraries)
    others = _subjects(module, "repeated", live, libraries)
    del subjects["nothing"]
    warm = [steps("repeated", live, 3 * live, seed) for seed in (1, 2)]
    runs = [steps("repeated", live, 2 * PAIRS, seed)[live:] for seed in (3, 4)]
    timed: dict[tuple[str, str], Callable[[int], float]] = {}
    for name, together in subjects.items():
        other = others[name]
        for subject in (together, other):
            subject.threads(2, *warm)
        timed[name, "one"] = lambda _, s=together: s.threads(1, *runs)
        timed[name, "two"] = lambda _, s=together: s.threads(2, *runs)
        timed[name, "apart"] = lambda _, s=together, o=other: s.threads(2, *runs, other=o)
    with _two_cores():
        samples = _interleaved(timed)  # type: ignore[arg-type]
    report: dict[str, dict[str, float]] = {}
    for name in subjects:
        one, two, apart = (samples[name, how] for how in ("one", "two", "apart"))  # type: ignore[index]
        report[name] = {
            "one": statistics.median(one) / (2 * PAIRS),
            "two": statistics.median(two) / (2 * PAIRS),
            "apart": statistics.median(apart) / (2 * PAIRS),
            "ratio": statistics.median(b / a for a, b in zip(one, two, strict=True)),
            "ratio_to_apart": statistics.median(b / a for a, b in zip(apart, two, strict=True)),
        }
    return {"live": live, "sizes": "repeated", "by": report, "goal": GOAL_TWO_THREADS}


@contextlib.contextmanager
def _two_cores() -> Iterator[None]:
    """Leave the process two CPUs, of two cores where the machine says which those are."""
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    siblings = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
    beside = siblings.read_text().strip() if siblings.exists() else str(first)
    spans = [[int(end) for end in part.split("-")] for part in beside.split(",")]
    apart = [cpu for cpu in others if not any(span[0] <= cpu <= span[-1] for span in spans)]
    os.sched_setaffinity(0, {first, *(apart or others)[:1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _c_functions(module: Any, live: int) -> dict[str, Any]:
    """Time pairs of repeated sizes by the functions of gpumem.h, and by what they are made of."""
    subjects = {"nothing": module.nothing(live)}
    for name, make in ((REFERENCE, module.core), (HOOK, module.hook), (C, module.c_functions)):
        arena = gpumem.Arena("host", {"backing": "regions", "split_rule": "tight"})
        subjects[name] = make(live, arena, [gpumem.Stream("host") for _ in range(2)])
    for subject in subjects.values():
        subject.pairs(steps("repeated", live, 3 * live, seed=1))
    runs = [steps("repeated", live, PAIRS, seed)[live:] for seed in range(2, 2 + ROUNDS)]
    samples = _interleaved({name: _timed_pairs(each, runs) for name, each in subjects.items()})
    return {
        "live": live,
        "nanoseconds": {name: statistics.median(values) for name, values in samples.items()},
        "ratios": ratios_within_rounds(samples, HOOK),
        "goals": {"ratio": GOAL_C_RATIO, "nanoseconds": GOAL_C_NS},
    }


def _handoff(module: Any, libraries: list[Any]) -> dict[str, Any]:
    """Let one thread allocate and another free; nanoseconds per block."""
    subjects = _subjects(module, "repeated", 1, libraries)
    run = steps("repeated", 1, PAIRS, seed=1)[1:]
    for subject in subjects.values():
        subject.handoff(run)
    timed = {
        name: lambda _, s=subject: s.handoff(run) / PAIRS for name, subject in subjects.items()
    }
    del timed["nothing"]  # its time is that of the queue, which the others' work overlaps
    samples = _interleaved(timed)
    return {
        "nanoseconds": {name: statistics.median(values) for name, values in samples.items()},
        "ratios": ratios_within_rounds(samples, REFERENCE),
    }


def _metadata(module: Any, live: int) -> dict[str, Any]:
    """Count records of chunks and pages while an arena takes `live` blocks of random sizes."""
    report: dict[str, Any] = {"chunk_bytes": module.chunk_bytes(), "goal": GOAL_METADATA}
    for backing in ("regions", "virtual"):
        arena = gpumem.Arena("host", {"backing": backing, "split_rule": "tight"})
        subject = module.core(live, arena, [gpumem.Stream("host") for _ in range(2)])
        subject.pairs(steps("random", live, live, seed=1))
        chunks = module.chunk_records(arena)
        report[backing] = {
            "chunks": chunks,
            "bytes_per_chunk": module.chunk_bytes() + module.page_table_bytes(arena) / chunks,
        }
    return report


# ---- tables --------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report, each figure with its goal."""
    for row in report["pairs"]:
        title = f"allocate and free below Python: {row['sizes']} sizes, {row['live']:,} live"
        table = _table(title, "allocator", "ns", "/ gpumem", "goal")
        for name, spent in row["nanoseconds"].items():
            goal = f">= {row['goals'][name]:g}" if name in row["goals"] else ""
            table.add_row(name, f"{spent:.0f}", f"{row['ratios'][name]:.2f}", goal)
        console.print(table)
    for row in report["latency"]:
        title = f"one operation by itself, {row['sizes']} sizes, {row['live']:,} live"
        table = _table(title, "percentile", "ns", "goal")
        for name, spent in row["nanoseconds"].items():
            goal = f"<= {row['goal_p99.9']}" if name == "p99.9" else ""
            table.add_row(name, f"{spent:.0f}", goal)
        console.print(table)
    for row in report["c_functions"]:
        title = f"by the functions of gpumem.h: repeated sizes, {row['live']:,} live"
        table = _table(title, "function", "ns", "/ hook")
        for name, spent in row["nanoseconds"].items():
            table.add_row(name, f"{spent:.0f}", f"{row['ratios'][name]:.2f}")
        goals = row["goals"]
        console.print(table, f"goal: {goals['ratio']:g}, {goals['nanoseconds']} ns")
    threads = report["threads"]
    title = f"threads, {threads['live']:,} live each"
    columns = "one", "two", "two apart", "two / one", "two / two apart"
    table = _table(title, "allocator", *columns)
    for name, row in threads["by"].items():
        spent = [f"{row[how]:.0f}" for how in ("one", "two", "apart")]
        table.add_row(name, *spent, f"{row['ratio']:.2f}", f"{row['ratio_to_apart']:.2f}")
    console.print(table, f"goal: the ratio of gpumem at most {threads['goal']:g}")
    handoff = report["handoff"]
    table = _table("one thread allocates, another frees", "allocator", "ns", "/ gpumem")
    for name, spent in handoff["nanoseconds"].items():
        table.add_row(name, f"{spent:.0f}", f"{handoff['ratios'][name]:.2f}")
    console.print(table)
    console.print("metadata:", report["metadata"], "\nabsent:", report["absent"] or "none")


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table


def main() -> int:
    """Measure in a new process; print tables, or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if parser.parse_args().json:
        json.dump(pairs(), sys.stdout)
    else:
        show(pairs(), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())

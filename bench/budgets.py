"""The cost of a budget: a charge per level, an allocation under one, many threads on one tree."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

import gpumem
from bench import native

MIB = 1 << 20
DEPTHS = (1, 2, 3, 4)
ROUNDS = 25
CHARGES = 200_000  # of one timed run
PAIRS = 100_000
THREADS = 16
LIMIT = 1000  # bytes that threads compete for
OPERATIONS = 10_000_000  # of all threads together


class Tree:
    """Budgets one under another; the limits of all but the lowest are never met."""

    def __init__(self, depth: int, limit: int = 1 << 40) -> None:
        self.levels = [gpumem.Budget(1 << 40)]
        for _ in range(depth - 1):
            self.levels.append(gpumem.Budget(1 << 40, parent=self.levels[-1]))
        self.leaf = self.levels[-1]
        self.leaf.limit = limit


def budgets(repeats: int = ROUNDS) -> dict[str, Any]:
    """Measure everything here and now; plain values."""
    module = native.load("_budgets")
    return {
        "charges": charges(module, repeats),
        "allocations": allocations(module, repeats),
        "threads": threads(module),
    }


def charges(module: Any, repeats: int) -> dict[str, float]:
    """Nanoseconds of a charge and of its end, by levels; and of one level more, a pair halved."""
    trees = {depth: Tree(depth) for depth in DEPTHS}
    samples: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(repeats):
        for depth, tree in trees.items():
            samples[depth].append(module.charge_pairs(tree.leaf, CHARGES) / CHARGES / 2)
    ordered = sorted(samples)
    slopes = [
        (samples[ordered[-1]][i] - samples[ordered[0]][i]) / (ordered[-1] - ordered[0])
        for i in range(repeats)
    ]
    figures = {f"{depth} levels": statistics.median(samples[depth]) for depth in DEPTHS}
    return {**figures, "per level": statistics.median(slopes)}


def allocations(module: Any, repeats: int) -> dict[str, dict[str, float]]:
    """Nanoseconds of an allocation and its free below Python, and ratios to an arena without."""
    root = gpumem.Budget(1 << 40)
    middle = gpumem.Budget(1 << 40, parent=root)
    arenas = {
        "no budget": gpumem.Arena("host"),
        "no budget, again": gpumem.Arena("host"),
        "reserved, 2 levels": gpumem.Arena("host", budget=middle),
        "in use, 1 level": gpumem.Arena("host", budget=root, count="in_use"),
        "in use, 2 levels": gpumem.Arena("host", budget=middle, count="in_use"),
    }
    samples: dict[str, list[float]] = {name: [] for name in arenas}
    for arena in arenas.values():
        arena.prepare(64 * MIB)
        module.arena_pairs(arena, PAIRS)
    for _ in range(repeats):
        for name, arena in arenas.items():
            samples[name].append(module.arena_pairs(arena, PAIRS) / PAIRS)
    plain = samples["no budget"]
    return {
        name: {
            "ns": statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, plain, strict=True)),
            "more ns per call": statistics.median(
                (a - b) / 2 for a, b in zip(values, plain, strict=True)
            ),
        }
        for name, values in samples.items()
    }


def threads(module: Any) -> dict[str, int]:
    """Charge from many threads near a limit; tell by how much the granted sum was above it."""
    tree = Tree(3, limit=LIMIT)
    return dict(module.race(tree.leaf, THREADS, OPERATIONS // THREADS))


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as tables."""
    table = Table(title="a charge or its end below Python")
    table.add_column("levels")
    table.add_column("ns", justify="right")
    for name, value in report["charges"].items():
        table.add_row(name, f"{value:.1f}")
    console.print(table)
    table = Table(title="4096 bytes allocated and freed below Python")
    for column in ("budget", "ns", "ratio", "more ns per call"):
        table.add_column(column)
    for name, row in report["allocations"].items():
        table.add_row(
            name, f"{row['ns']:.1f}", f"{row['ratio']:.3f}", f"{row['more ns per call']:.1f}"
        )
    console.print(table)
    console.print(report["threads"])


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.budgets", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=ROUNDS)
    chosen = parser.parse_args(arguments)
    report = budgets(chosen.repeats)
    if chosen.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        show(report, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())

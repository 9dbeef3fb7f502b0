"""Peaks of memory of scripts on a GPU, as `gpumem predict` counts them.

Each script runs unmodified, in a process for each allocator, one after the other, until its
optimizer has stepped as often as is told. A JSON object for each run is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpumem._support.sizes import parse_size
from gpumem.prediction import ALLOCATORS, gpus
from gpumem.prediction.child.program import Program
from gpumem.prediction.child.run import ScriptRun, path_of_answer

LINES = 6  # of a failed script's output


class NoListener:
    """Stands for the null CUDA, which reports reads and refusals: a GPU has neither."""

    def null_listen(self, listener: object) -> None:
        pass


def run_here(order: dict[str, Any], allocator: str) -> None:
    """Run a script in this process, which ends with it."""
    import torch

    def limit() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(order["limit"] / total)

    if order["limit"]:
        torch.cuda._lazy_call(limit)
    ScriptRun(order, NoListener(), Program(order), allocator, None).run()


def measure(
    command: list[str], allocator: str, steps: int, limit: int, seconds: float
) -> dict[str, Any]:
    """Run a script in a process of its own; return its row."""
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        order = {"command": command, "steps": steps, "folder": folder, "limit": limit}
        order |= {"until": "", "recorded": "", "call": ""}
        own = [sys.executable, "-m", "bench.script_peaks", "--here", json.dumps(order)]
        row: dict[str, Any] = {"script": command[0], "allocator": allocator}
        try:
            done = subprocess.run(
                [*own, "--allocators", allocator],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return row | {"end": "time"}
        answer = Path(path_of_answer(order, allocator, None))
        if answer.exists():
            row |= json.loads(answer.read_text())
        else:
            row |= {"end": "failed", "reason": f"exit status {done.returncode}"}
        if row["end"] == "failed":
            row["output"] = done.stdout.splitlines()[-LINES:]
        return row


def rows(chosen: argparse.Namespace, limit: int) -> Iterator[dict[str, Any]]:
    for script in chosen.scripts:
        for round_ in range(chosen.rounds):
            for allocator in chosen.allocators:
                command = [script, *chosen.arguments.split()]
                row = measure(command, allocator, chosen.steps, limit, chosen.seconds)
                told = {key: value for key, value in row.items() if value not in ("", [])}
                yield {"round": round_} | told


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.script_peaks", description=__doc__)
    parser.add_argument("scripts", nargs="*")
    parser.add_argument("--arguments", default="", help="of each script, in one string")
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=ALLOCATORS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory", help="of the GPU, as --memory of `gpumem predict`: 24GiB")
    parser.add_argument("--seconds", type=float, default=300, help="after which a run is ended")
    parser.add_argument("--out", type=argparse.FileType("a"), help="a file for the rows, too")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        run_here(json.loads(chosen.here), chosen.allocators[0])
    limit = parse_size(chosen.memory) - gpus.gpu().context if chosen.memory else 0
    failed = 0
    for row in rows(chosen, limit):
        failed += row["end"] in ("failed", "time")
        print(json.dumps(row), flush=True)
        if chosen.out:
            print(json.dumps(row), file=chosen.out, flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

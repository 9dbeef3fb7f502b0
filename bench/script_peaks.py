"""Peaks of memory of scripts on a GPU, as `gpumem predict` counts them.

Each script runs unmodified, in a process for each allocator, one after the other, until its
optimizer has stepped as often as is told. A JSON object for each run is printed, and with
`--rounds` a table of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import markdown
from bench.harness import ratios_within_rounds
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
    program = Program(order)
    program.import_ahead()
    sys.stdin.readline()
    ScriptRun(order, NoListener(), program, allocator, None).run()


class Waiting:
    """The process of one run, which has imported the script's modules and waits for its turn.

    So the runs follow each other at once, and none runs while another is measured.
    """

    def __init__(
        self, command: list[str], allocator: str, steps: int, limit: int, folder: Path
    ) -> None:
        folder.mkdir()
        order = {"command": command, "steps": steps, "folder": str(folder), "limit": limit}
        order |= {"until": "", "recorded": "", "call": ""}
        own = [sys.executable, "-m", "bench.script_peaks", "--here", json.dumps(order)]
        self.row: dict[str, Any] = {"script": command[0], "allocator": allocator}
        self._answer = Path(path_of_answer(order, allocator, None))
        self._output = folder / "output"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*own, "--allocators", allocator],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, seconds: float) -> dict[str, Any]:
        """Let it run the script; return its row."""
        try:
            self._process.communicate(b"\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return self.row | {"end": "time"}
        row = self.row | {"end": "failed", "reason": f"exit status {self._process.returncode}"}
        if self._answer.exists():
            row |= json.loads(self._answer.read_text())
        if row["end"] == "failed":
            files = [self._output, Path(f"{self._answer}.out")]
            text = "".join(file.read_text(errors="replace") for file in files if file.exists())
            row["output"] = text.splitlines()[-LINES:]
        return row


def rows(chosen: argparse.Namespace, limit: int) -> Iterator[dict[str, Any]]:
    for script in chosen.scripts:
        command = [script, *chosen.arguments.split()]
        with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
            order = [(each, name) for each in range(chosen.rounds) for name in chosen.allocators]
            waiting = [
                Waiting(command, name, chosen.steps, limit, Path(folder, f"{name}{each}"))
                for each, name in order
            ]
            for (each, _), process in zip(order, waiting, strict=True):
                row = process.run(chosen.seconds)
                told = {key: value for key, value in row.items() if value not in ("", [])}
                yield {"round": each} | told


def table(made: list[dict[str, Any]]) -> str:
    """Make a table of the rounds that ended: highest bytes, and the median of the median steps."""
    lines = []
    for script in dict.fromkeys(row["script"] for row in made):
        rounds: dict[int, dict[str, dict[str, Any]]] = {}
        for row in made:
            if row["script"] == script:
                rounds.setdefault(row["round"], {})[row["allocator"]] = row
        ended = [of for of in rounds.values() if all(row.get("seconds") for row in of.values())]
        if not ended:
            continue
        times = {name: [of[name]["seconds"] for of in ended] for name in ended[0]}
        ratios = ratios_within_rounds(times, next(iter(times)))
        for name in times:
            reserved, live = (max(of[name][key] for of in ended) for key in ("reserved", "live"))
            of_step = [f"{1e3 * statistics.median(times[name]):.1f} ms", f"{ratios[name]:.3f}"]
            in_gib = [f"{nbytes / 2**30:.2f} GiB" for nbytes in (live, reserved)]
            ended_runs = [Path(script).stem, name, str(len(ended))]
            lines.append([*ended_runs, *in_gib, f"{reserved / live:.3f}", *of_step])
    heads = ["script", "allocator", "rounds", "live", "reserved", "reserved / live"]
    return markdown.table([*heads, "median step", "ratio"], lines)


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
    made = []
    for row in rows(chosen, limit):
        made.append(row)
        print(json.dumps(row), flush=True)
        if chosen.out:
            print(json.dumps(row), file=chosen.out, flush=True)
    if chosen.rounds > 1:
        print(table(made))
    return any(row["end"] in ("failed", "time") for row in made)


if __name__ == "__main__":
    sys.exit(main())

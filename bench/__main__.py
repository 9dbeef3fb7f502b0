"""Run every measurement that this machine can run; see the package's docstring."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import gpumem
from bench import calls, copies, interop, pairs, replays, sessions, views
from bench.harness import Timing


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--traces", type=Path, help="folder of further .npz traces to replay")
    chosen = parser.parse_args(arguments)
    traces = sorted(chosen.traces.glob("*.npz")) if chosen.traces else []
    report = measure(traces)
    if chosen.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        show(report)
    return 0


def measure(traces: list[Path]) -> dict[str, Any]:
    """Run everything; a dict of plain values."""
    timings = {
        "host_calls": calls.host_calls(),
        "gpu_calls": calls.gpu_calls(),
        "session_outputs": sessions.outputs(),
        **views.views(),
        **copies.copies(),
        **interop.timings(),
    }
    return {
        "machine": machine(),
        "below_python": pairs.pairs(),
        "timings": {name: asdict(timing) for name, timing in timings.items() if timing},
        "replays": replays.replays(traces),
    }


def machine() -> dict[str, str]:
    """Return the machine and the versions of the figures."""
    status = gpumem.driver_status()
    described = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpumem": gpumem.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cuda": str(status.version) if status.available else "none",
    }
    if status.available:
        described["gpu"] = gpumem.Device("cuda:0").name
    return described


def show(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    console = Console()
    console.print(report["machine"])
    pairs.show(report["below_python"], console)
    for name, values in report["timings"].items():
        timing = Timing(**values)
        table = Table(title=f"{name} (median of {timing.rounds} interleaved rounds)")
        table.add_column("call")
        table.add_column("ns", justify="right")
        table.add_column(f"/ {timing.reference}", justify="right")
        for call, nanoseconds in timing.nanoseconds.items():
            table.add_row(call, f"{nanoseconds:.0f}", f"{timing.ratios[call]:.2f}")
        console.print(table)
    replays.show(report["replays"], console)


if __name__ == "__main__":
    sys.exit(main())

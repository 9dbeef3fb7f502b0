"""The cost of views for NumPy, PyTorch and C code, and of an empty tensor.

Candidates call as programs do, with their keywords written out: a ``functools.partial`` that holds
keywords builds a dict for each call, which costs more than the measured call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import gpumem
from bench import native
from bench.harness import Candidate, Timing, interleave

LENGTH = 1024  # float32 elements
GPU_LENGTH = 1 << 18  # 1 MiB
ROUNDS = 101
BATCH_SECONDS = 0.001
C_CALLS = 1000  # of one candidate's run, without Python between them
NEWEST = (1, 0)

# row -> candidate: what its ratio to the row's reference has to reach, at most (or at least).
AT_MOST = {
    "np.from_dlpack": {"Tensor": 0.8},
    "__dlpack__(max_version=(1, 0))": {"Tensor": 0.7},
    "empty of 4 KiB, host": {"gpumem.empty": 1.2},
    "torch.from_dlpack": {"Tensor": 1.0},
}
AT_LEAST = {"empty of 1 MiB, GPU": {"torch.empty": 6.0, "cupy.empty": 6.0}}
GOAL_EXCHANGE_NS = 40
EXCHANGE = "C exchange API: an export and its deleter"


def views() -> dict[str, Timing]:
    """Measure all that this machine and its packages allow."""
    rows = {
        "np.from_dlpack": numpy_views(),
        "__dlpack__(max_version=(1, 0))": capsules(),
        EXCHANGE: exchange(),
        "empty of 4 KiB, host": empty_on_host(),
        "torch.from_dlpack": torch_views(),
        "empty of 1 MiB, GPU": empty_on_gpu(),
    }
    return {name: timing for name, timing in rows.items() if timing is not None}


def timed(candidates: dict[str, Candidate], reference: str) -> Timing:
    return interleave(candidates, reference, rounds=ROUNDS, batch_seconds=BATCH_SECONDS)


# ---- views ---------------------------------------------------------------------------------------


def numpy_views() -> Timing:
    """Make a NumPy array of an array, of a Tensor, of a Buffer."""
    return consumed_by(np.from_dlpack)


def torch_views() -> Timing | None:
    """Make a torch.Tensor of each; None without PyTorch."""
    torch = installed("torch")
    return consumed_by(torch.from_dlpack) if torch else None


def consumed_by(consume: Callable[[Any], Any]) -> Timing:
    array, tensor = subjects()
    buffer = tensor.buffer
    return timed(
        {
            "ndarray": lambda: consume(array),
            "Tensor": lambda: consume(tensor),
            "Buffer": lambda: consume(buffer),
        },
        "ndarray",
    )


def capsules() -> Timing | None:
    """Make a capsule and drop it; None where NumPy's own has no versions, before 2.1."""
    array, tensor = subjects()
    buffer = tensor.buffer
    try:
        array.__dlpack__(max_version=NEWEST)
    except TypeError:
        return None
    return timed(
        {
            "ndarray": lambda: array.__dlpack__(max_version=(1, 0)),
            "Tensor": lambda: tensor.__dlpack__(max_version=(1, 0)),
            "Buffer": lambda: buffer.__dlpack__(max_version=(1, 0)),
        },
        "ndarray",
    )


def exchange() -> Timing:
    """Export through ``__dlpack_c_exchange_api__`` and delete, from C; PyTorch's, where it is."""
    module = native.load("_exchange")
    made = {"gpumem.Tensor": subjects()[1]}
    torch = installed("torch")
    if torch and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        made["torch.Tensor"] = torch.empty(LENGTH)
    candidates = {name: module.Exporter(tensor, C_CALLS).run for name, tensor in made.items()}
    timing = timed(candidates, "gpumem.Tensor")
    each = {name: spent / C_CALLS for name, spent in timing.nanoseconds.items()}
    return replace(timing, nanoseconds=each)


def subjects() -> tuple[np.ndarray, gpumem.Tensor]:
    return np.empty(LENGTH, np.float32), gpumem.empty(LENGTH, np.float32, memory="host")


# ---- empty tensors -------------------------------------------------------------------------------


def empty_on_host() -> Timing:
    """Make an uninitialised tensor and drop it, by the shape and dtype alone and with a memory."""
    dtype = np.float32
    return timed(
        {
            "np.empty": lambda: np.empty((1024,), dtype),
            "gpumem.empty": lambda: gpumem.empty((1024,), dtype, memory="host"),
        },
        "np.empty",
    )


def empty_on_gpu() -> Timing | None:
    """Make 1 MiB on the GPU and drop it, and in the installed libraries; None without a GPU."""
    if not gpumem.driver_status().available:
        return None
    dtype = np.float32
    candidates: dict[str, Candidate] = {
        "gpumem.empty": lambda: gpumem.empty((GPU_LENGTH,), dtype, memory="cuda:0")
    }
    torch, cupy = installed("torch"), installed("cupy")
    if torch and torch.cuda.is_available():
        candidates["torch.empty"] = lambda: torch.empty(GPU_LENGTH, device="cuda")
    if cupy:
        candidates["cupy.empty"] = lambda: cupy.empty(GPU_LENGTH, dtype)
    keep = gpumem.empty((GPU_LENGTH,), dtype, memory="cuda:0")
    timing = timed(candidates, "gpumem.empty")
    keep.buffer.close()
    return timing


def installed(name: str) -> Any:
    """Import a library, or return None."""
    try:
        return __import__(name)
    except ImportError:
        return None


# ---- tables --------------------------------------------------------------------------------------


def goal(row: str, candidate: str) -> str:
    """Return the goal as text, "" where there is none."""
    if row == EXCHANGE and candidate == "gpumem.Tensor":
        return f"<= {GOAL_EXCHANGE_NS} ns"
    if candidate in AT_MOST.get(row, ()):
        return f"<= {AT_MOST[row][candidate]:g}"
    if candidate in AT_LEAST.get(row, ()):
        return f">= {AT_LEAST[row][candidate]:g}"
    return ""


def show(rows: dict[str, Timing], console: Console) -> None:
    """Print the rows, each figure with its goal."""
    table = Table(title=f"views (medians of {ROUNDS} interleaved rounds)")
    table.add_column("what")
    table.add_column("of")
    for column in ("ns", "ratio", "goal"):
        table.add_column(column, justify="right")
    for row, timing in rows.items():
        for candidate, nanoseconds in timing.nanoseconds.items():
            ratio = f"{timing.ratios[candidate]:.2f}"
            table.add_row(row, candidate, f"{nanoseconds:.0f}", ratio, goal(row, candidate))
    console.print(table)


def main() -> int:
    """Measure; print a table, or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.views", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    rows = views()
    if as_json:
        json.dump({name: asdict(timing) for name, timing in rows.items()}, sys.stdout, indent=1)
        print()
    else:
        show(rows, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Memory plans: how near the bound, beside ONNX Runtime's arena and ours; what following one costs.

The models are those of the tests, small and in larger sizes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpumem
from bench import markdown
from gpumem._testing import host_device
from gpumem.planning import (
    GraphBuilder,
    IterationPlan,
    ModelGraph,
    PlannedResource,
    partition,
    plan,
    plan_memory,
)
from gpumem.planning.memory.lifetimes import rounded
from gpumem.traces import Trace, load_trace, samples

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

ROUNDS = 15
PRETENDED_CAPACITY = 1 << 46  # bytes of the host device: nothing touches them
ORT_SCRIPT = Path(__file__).with_name("smallest_ort_arena.py")
ORT_STEP = 4096  # bytes to which the smallest limit is found
LARGER = {
    "resnet": {"blocks": 16, "channels": 64, "size": 56},
    "bert": {"layers": 12, "batch": 2, "length": 128, "width": 256, "heads": 8},
    "gpt": {"layers": 12, "batch": 1, "length": 256, "width": 256, "heads": 8},
}


# ---- models --------------------------------------------------------------------------------------


def model_rows(interpreter: str | None) -> list[list[str]]:
    """Plan each model; with an interpreter that has onnxruntime, find the arena that it needs."""
    from planning.models import MODELS

    rows = []
    for larger in (False, True):
        for name, make in MODELS.items():
            model = make(**LARGER[name]) if larger else make()
            title = f"{name}, larger" if larger else name
            rows.append([title, *_model_row(model, interpreter)])
    return rows


def _model_row(model: Any, interpreter: str | None) -> list[str]:
    placement = partition(ModelGraph.from_onnx(model), ["host"])
    seconds, made = _timed(lambda: plan_memory(placement))
    made.verify()
    peak = made.peak_bytes
    row = [f"{len(made.places):,}", f"{peak:,}", f"{peak / made.lower_bound_bytes:.4f}"]
    row.append(f"{seconds * 1000:.1f}")
    if interpreter is not None:
        limit = smallest_arena(model, interpreter)
        row += [f"{limit:,}", f"{peak / limit:.3f}"]
    return row


def smallest_arena(model: Any, interpreter: str) -> int:
    """Bisect the `max_mem` under which ONNX Runtime runs a model, to 4 KiB, beyond its weights.

    Up to 1.31 weights are in the arena and count. A limit below them is none: what is left is then
    a negative number in an unsigned one, so the search begins above. Later they lie outside of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(model.SerializeToString())

        def runs(limit: int) -> bool:
            command = [interpreter, str(ORT_SCRIPT), str(path), str(limit)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        # No model runs in so little, unless that is below its weights and so no limit.
        inside = _weight_bytes(model) if runs(ORT_STEP) else 0
        low, high = inside + ORT_STEP, inside + (64 << 20)
        if runs(low) or not runs(high):
            raise RuntimeError(
                f"{low} to {high} bytes do not hold the limit of ONNX Runtime's arena"
            )
        while high - low > ORT_STEP:
            middle = (low + high) // 2
            low, high = (low, middle) if runs(middle) else (middle, high)
    return high - inside


def _weight_bytes(model: Any) -> int:
    from onnx import numpy_helper

    weights = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    return sum(rounded(weight.nbytes, 256) for weight in weights)


def many_values(count: int = 10_000) -> float:
    """Return the seconds of one core that planning a graph of so many values takes."""
    numbers = random.Random(1)
    builder = GraphBuilder()
    values = [builder.input("x", "uint8", (256,))]
    for number in range(count):
        made = builder.value(f"v{number}", "uint8", (numbers.randrange(1, 4000) * 256,))
        other = values[max(0, len(values) - numbers.randrange(1, 20))]
        builder.node("MatMul", [values[-1], other], [made])
        values.append(made)
    placement = partition(builder.build([values[-1]]), ["host"])
    seconds = []
    for _ in range(5):
        began = time.process_time()
        plan_memory(placement)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


# ---- recorded iterations -------------------------------------------------------------------------


def steps_of(trace: Trace) -> list[tuple[int | None, int, int]]:
    """Return each iteration's number, first event and the one behind its last."""
    if not len(trace.step_start):
        return [(None, 0, trace.events)]
    ends = [*trace.step_start.tolist()[1:], trace.events]
    return [
        (number, *span)
        for number, span in enumerate(zip(trace.step_start.tolist(), ends, strict=True))
    ]


def recorded_row(trace: Trace) -> list[str]:
    """Plan every iteration of a recording, and run each on a fresh arena for comparison."""
    ratios, online, seconds = [], [], []
    for number, begin, end in steps_of(trace):
        took, made = _timed(lambda number=number: plan(trace, number))
        made.verify()
        ratios.append(made.peak_bytes / made.requested_bytes)
        seconds.append(took)
        online.append(_reserved_online(trace, begin, end) / made.requested_bytes)
    return [
        trace.name,
        str(len(ratios)),
        f"{statistics.median(ratios):.4f}",
        f"{max(ratios):.4f}",
        f"{statistics.median(online):.4f}",
        f"{max(online):.4f}",
        f"{statistics.median(seconds):.2f}",
    ]


def _reserved_online(trace: Trace, begin: int, end: int) -> int:
    arena = gpumem.Arena("host")
    streams = [gpumem.Stream("host") for _ in range(trace.streams)]
    run_events(arena, streams, events_of(trace, begin, end))
    return arena.stats().max_reserved


def events_of(trace: Trace, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return (block, bytes, stream) of what the events allocate; bytes -1: its free."""
    columns = (trace.action, trace.block, trace.size, trace.stream)
    known: set[int] = set()
    events = []
    for action, block, size, stream in zip(*(c[begin:end].tolist() for c in columns), strict=True):
        if action == 0:
            known.add(block)
            events.append((block, size, stream))
        elif action == 2 and block in known:
            events.append((block, -1, stream))
    return events


def run_events(resource: Any, streams: list[Any], events: list[tuple[int, int, int]]) -> None:
    """Allocate and free as recorded; what is left at the end is freed there."""
    live: dict[int, Any] = {}
    allocate = resource.allocate
    for block, size, stream in events:
        if size >= 0:
            live[block] = allocate(size, streams[stream])
        else:
            del live[block]


def following_rows(trace: Trace, step: int | None) -> list[list[str]]:
    """Time an iteration on a resource that follows its plan and on arenas, in turn."""
    _, begin, end = steps_of(trace)[step or 0]
    events = events_of(trace, begin, end)
    streams = [gpumem.Stream("host") for _ in range(trace.streams)]
    made = plan(trace, step)
    upstream = gpumem.Arena("host")
    planned = PlannedResource(made, upstream)
    arenas = {"arena, pages": gpumem.Arena("host")}
    arenas["arena, regions"] = gpumem.Arena("host", {"backing": "regions"})

    def follow() -> None:
        with planned.iteration():
            run_events(planned, streams, events)

    candidates = {"following the plan": follow}
    for name, arena in arenas.items():
        candidates[name] = lambda arena=arena: run_events(arena, streams, events)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(ROUNDS + 2):
        for name, run in candidates.items():
            took, _ = _timed(run)
            if number >= 2:
                times[name].append(took * 1e9 / len(events))
    if planned.report.mismatch is not None:
        raise RuntimeError(f"the plan was not followed: {planned.report.mismatch}")
    return _following_table(made, times, planned, arenas)


def _following_table(
    made: IterationPlan,
    times: dict[str, list[float]],
    planned: PlannedResource,
    arenas: dict[str, gpumem.Arena],
) -> list[list[str]]:
    reference = times["arena, regions"]
    held = {name: arena.stats().max_reserved for name, arena in arenas.items()}
    held["following the plan"] = planned.stats().max_reserved
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, reference, strict=True))
        share = held[name] / made.requested_bytes
        rows.append([name, f"{statistics.median(taken):.0f}", f"{ratio:.2f}", f"{share:.4f}"])
    return rows


# ---- all of it -----------------------------------------------------------------------------------


def report(folder: Path | None, interpreter: str | None) -> str:
    """Measure, and return Markdown."""
    gpumem.Device("host")._open()
    host_device.set_capacity(0, PRETENDED_CAPACITY)
    heads = ["model", "values", "peak, bytes", "peak / lower bound", "planned in ms"]
    if interpreter is not None:
        heads += ["ONNX Runtime's smallest arena, beyond weights", "peak / that"]
    parts = [markdown.table(heads, model_rows(interpreter))]
    parts.append(f"Planning 10 000 values takes {many_values():.2f} s of one core.")
    paths = sorted(folder.glob("*.npz")) if folder is not None else list(samples().values())
    traces = [load_trace(path) for path in paths]
    heads = ["recording", "iterations", "plan / requested", "at most", "arena / requested"]
    heads += ["at most", "planned in s"]
    parts.append(markdown.table(heads, [recorded_row(trace) for trace in traces]))
    for trace in traces:
        step = 2 if len(trace.step_start) > 2 else None
        heads = [f"{trace.name}, one iteration again and again", "ns per call", "ratio"]
        heads.append("reserved / requested")
        parts.append(markdown.table(heads, following_rows(trace, step)))
    return "\n\n".join(parts)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, help="a folder of recordings; else the bundled ones")
    parser.add_argument("--onnxruntime", metavar="PYTHON", help="an interpreter that has it")
    given = parser.parse_args()
    print(report(given.traces, given.onnxruntime))


if __name__ == "__main__":
    main()

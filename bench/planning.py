"""Memory plans: how near the bound they are, and how near ONNX Runtime's arena.

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

from bench import markdown
from gpumem.planning import GraphBuilder, ModelGraph, partition, plan_memory
from gpumem.planning.memory.lifetimes import rounded

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

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
    """Bisect the `max_mem` under which ONNX Runtime runs a model, to 4 KiB, less weights inside.

    Versions up to 1.31 keep all weights in the arena, later ones some or none. A limit below those
    is none: the rest is then a negative number in an unsigned one. So the model fails under the
    limits between two ends, and the lower end is the weights inside.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(model.SerializeToString())

        def runs(limit: int) -> bool:
            command = [interpreter, str(ORT_SCRIPT), str(path), str(limit)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        def last(low: int, high: int, found: bool) -> int:
            """Return the limit to which `runs` is `found`; it is for `low`, not for `high`."""
            while high - low > ORT_STEP:
                middle = (low + high) // 2
                low, high = (middle, high) if runs(middle) == found else (low, middle)
            return high

        weights = _weight_bytes(model)
        tried = [ORT_STEP, weights + ORT_STEP]
        tried += [ORT_STEP * 5**power // 4**power for power in range(1, 48)]
        refused = next((limit for limit in tried if not runs(limit)), None)
        highest = weights + (64 << 20)
        if refused is None or not runs(highest):
            raise RuntimeError(f"no limit of ONNX Runtime's arena up to {highest} bytes was found")
        inside = 0 if refused == ORT_STEP else last(0, refused, True)
        return last(refused, highest, False) - inside


def _weight_bytes(model: Any) -> int:
    from onnx import numpy_helper

    weights = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    return sum(rounded(weight.nbytes, 256) for weight in weights)


def many_values(count: int = 10_000) -> float:
    """Return the seconds of one core that planning a graph of `count` values takes."""
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


# ---- all of it -----------------------------------------------------------------------------------


def report(interpreter: str | None) -> str:
    """Measure, and return Markdown."""
    heads = ["model", "values", "peak, bytes", "peak / lower bound", "planned in ms"]
    if interpreter is not None:
        heads += ["ONNX Runtime's smallest arena without weights", "peak / that"]
    parts = [markdown.table(heads, model_rows(interpreter))]
    parts.append(f"Planning 10 000 values takes {many_values():.2f} s of one core.")
    return "\n\n".join(parts)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--onnxruntime", metavar="PYTHON", help="an interpreter that has it")
    given = parser.parse_args()
    print(report(given.onnxruntime))


if __name__ == "__main__":
    main()

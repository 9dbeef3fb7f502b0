"""ONNX Runtime over an arena, and over its own: bytes held, highest bytes, time, copies.

Without a GPU it measures copies and time of bound tensors with the CPU provider, which has memory
of its own. Needs the packages onnx and onnxruntime, or onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import gpumem
from bench.harness import interleave
from gpumem.integrations import onnxruntime as integration

GOALS = {"held": 1.02, "peak": 1.0, "time": 1.01, "copied_bytes": 0}
SHRINK = ("memory.enable_memory_arena_shrinkage", "gpu:0")


def chain(layers: int, width: int) -> bytes:
    """Make a model: ``x = relu(x @ w)`` per layer, for any number of rows."""
    import onnx

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    random = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(
            random.normal(scale=width**-0.5, size=(width, width)).astype("f4"), f"w{i}"
        )
        for i in range(layers)
    ]
    nodes = []
    for i in range(layers):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"x{i + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, kind, ["rows", width]) for name in ("x0", f"x{layers}")
    ]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    whole: bytes = model.SerializeToString()
    return whole


def copies(model: bytes, rows: int, width: int) -> dict[str, Any]:
    """Run on the CPU with bound tensors and with arrays: bytes copied, and the ratio of times."""
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder, "profile"))
        profiled = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        x, y, binding = _bound(profiled, rows, width, "host", None)
        profiled.run_with_iobinding(binding)
        events = json.loads(Path(profiled.end_profiling()).read_text())
    copied = sum(t.nbytes for t in (y,) if binding.get_outputs()[0].data_ptr() != t.ptr)
    nodes = [e["args"]["op_name"] for e in events if "op_name" in e.get("args", {})]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # its threads spin, and would measure other programs
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    x, y, binding = _bound(session, rows, width, "host", None)
    array = x.numpy().copy()
    timing = interleave(
        {
            "arrays": lambda: session.run(None, {"x0": array}),
            "bound": lambda: session.run_with_iobinding(binding),
        },
        "arrays",
        rounds=9,
    )
    return {
        "copied_bytes": copied,
        "copying_nodes": sum(name.startswith("Memcpy") for name in nodes),
        "nodes": len(nodes),
        "time": timing.ratios["bound"],
    }


def sessions(model: bytes, runs: Iterable[int], width: int, weight_bytes: int) -> dict[str, Any]:
    """Run on the GPU over ONNX Runtime's own arena and over an arena of gpumem."""
    import onnxruntime as ort

    runs = list(runs)
    device = gpumem.Device("cuda:0")
    # Kernels, handles and their workspaces are loaded before anything is counted.
    _run_all(ort, chain(1, 64), [8], 64, {}, None, lambda: None)
    before = device.free_bytes
    own: dict[str, int] = {}

    def look() -> None:
        own["peak"] = max(own.get("peak", 0), before - device.free_bytes)

    own_session, own_time = _run_all(ort, model, runs, width, {}, SHRINK, look)
    own["held"] = before - device.free_bytes
    arena = gpumem.Arena("cuda:0")
    memory = integration.allocator(arena)
    over, over_time = _run_all(ort, model, runs, width, memory.provider_options, None, lambda: None)
    peak = arena.stats().max_reserved
    memory.shrink()
    held = arena.stats().reserved
    timing = interleave({"own": own_time, "gpumem": over_time}, "own", rounds=15)
    del own_session, over, own_time, over_time
    return {
        "weights": weight_bytes,
        "own": own,
        "gpumem": {"peak": peak, "held": held},
        "held": held / weight_bytes,
        "peak": peak / own["peak"],
        "time": timing.ratios["gpumem"],
    }


def _run_all(
    ort: Any,
    model: bytes,
    runs: list[int],
    width: int,
    options: dict[str, str],
    shrink: tuple[str, str] | None,
    look: Callable[[], None],
) -> tuple[Any, Callable[[], object]]:
    """Run each number of rows once; return the session and a call that runs the last again.

    ONNX Runtime copies the arrays into memory of the session's, which counts on both sides.
    """
    providers = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
    session = ort.InferenceSession(model, providers=providers)
    for rows in runs:
        session.run(None, {"x0": np.ones((rows, width), "f4")})
        look()
    run_options = ort.RunOptions()
    if shrink is not None:
        run_options.add_run_config_entry(*shrink)
    array = np.ones((runs[-1], width), "f4")
    session.run(None, {"x0": array}, run_options)
    return session, lambda: session.run(None, {"x0": array})


def _bound(session: Any, rows: int, width: int, memory: str, resource: Any) -> tuple[Any, ...]:
    x, y = (gpumem.zeros((rows, width), "f4", memory=memory, resource=resource) for _ in range(2))
    (output,) = session.get_outputs()
    return x, y, integration.bind(session, {"x0": x}, {output.name: y})


def main() -> int:
    """Measure all that this machine can run; print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.onnx_sessions", description=__doc__)
    parser.add_argument("--layers", type=int, default=0, help="0: 4, and 16 on a GPU")
    parser.add_argument("--width", type=int, default=0, help="0: 256, and 2048 on a GPU")
    given = parser.parse_args()
    import onnxruntime as ort

    on_gpu = "CUDAExecutionProvider" in ort.get_available_providers() and (
        gpumem.driver_status().available
    )
    layers, width = given.layers or (16 if on_gpu else 4), given.width or (2048 if on_gpu else 256)
    model = chain(layers, width)
    report: dict[str, Any] = {"goals": GOALS, "bound": copies(model, 64, width)}
    if on_gpu:
        report["sessions"] = sessions(
            model, [64, 4096, 512, 8192, 64], width, layers * 4 * width**2
        )
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

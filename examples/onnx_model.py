"""ONNX Runtime reads and writes gpumem's tensors in place, and on a GPU allocates from their arena.

    python examples/onnx_model.py                    # the GPU if ONNX Runtime has it, else the host
    python examples/onnx_model.py --device host

On the host ONNX Runtime's memory is its own, and only inputs and outputs are gpumem's. A memory
plan of the same model says what it needs beside its weights. Needs the packages onnx and
onnxruntime; on a GPU onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

import gpumem
from gpumem.integrations import onnxruntime as gpumem_ort
from gpumem.planning import ModelGraph, partition, plan_memory

try:
    import onnx
    import onnxruntime as ort
except ImportError as error:
    print(f"this example needs onnx and onnxruntime: {error}")
    sys.exit()

ROWS, WIDTH, LAYERS = 64, 256, 4
KIB = 1 << 10


def made() -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Return a model, ``x = relu(x @ w)`` per layer, and its weights."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    random = np.random.default_rng(0)
    weights = [
        random.normal(scale=WIDTH**-0.5, size=(WIDTH, WIDTH)).astype("f4") for _ in range(LAYERS)
    ]
    nodes = []
    for i in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"x{i + 1}"]))
    first, last = (
        helper.make_tensor_value_info(name, kind, [ROWS, WIDTH]) for name in ("x0", f"x{LAYERS}")
    )
    constants = [onnx.numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    graph = helper.make_graph(nodes, "layers", [first], [last], constants)
    opset = helper.make_opsetid("", 18)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9), weights


def main() -> None:
    """Run the model twice, compare with NumPy, and print what memory it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = "CUDAExecutionProvider" in ort.get_available_providers()
    default = str(gpumem.default_device()) if on_gpu else "host"
    parser.add_argument("--device", default=default)
    device = gpumem.Device(parser.parse_args().device)
    model, weights = made()
    arena = gpumem.Arena(device)
    x, y = (gpumem.zeros((ROWS, WIDTH), "float32", resource=arena) for _ in range(2))
    before = arena.stats().in_use

    memory = gpumem_ort.allocator(arena) if device.type == "cuda" else None
    providers: list[Any] = ["CPUExecutionProvider"]
    if memory is not None:
        providers = [("CUDAExecutionProvider", memory.provider_options)]
    session = ort.InferenceSession(model.SerializeToString(), providers=providers)
    binding = gpumem_ort.bind(session, {"x0": x}, {f"x{LAYERS}": y})
    for step in (1, 2):
        array = np.random.default_rng(step).normal(size=x.shape).astype("f4")
        gpumem.copy(x, array)
        x.buffer.stream.synchronize()  # ONNX Runtime does not know this stream
        session.run_with_iobinding(binding)
        expected = array
        for weight in weights:
            expected = np.maximum(expected @ weight, 0)
        # A GPU may multiply with shorter mantissas.
        same = np.allclose(y.to("host").numpy(), expected, rtol=1e-2, atol=1e-2)
        print(f"run {step}: as NumPy computes it: {same}")
    print(f"written in place: {binding.get_outputs()[0].data_ptr() == y.ptr}")

    plan = plan_memory(partition(ModelGraph.from_onnx(model), [str(device)]))
    weight_bytes = sum(each.nbytes for each in weights)
    print(f"a plan needs {plan.peak_bytes // KIB} KiB beside {weight_bytes // KIB} KiB of weights")
    if memory is not None:
        peak = arena.stats().max_in_use - before
        print(f"ONNX Runtime took at most {peak // KIB} KiB of the arena, weights included")
        memory.shrink()
        print(f"the arena holds {arena.stats().reserved // KIB} KiB between runs")
        del binding, session  # they have blocks of the arena
        memory.close()


if __name__ == "__main__":
    main()

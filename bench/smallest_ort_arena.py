"""Run an ONNX model twice with ONNX Runtime under a limit of its CPU arena; code 0 if it could.

Needs the package onnxruntime and nothing of gpumem: `bench.planning` starts it with an interpreter
that has it.
"""

import sys

import numpy as np
import onnxruntime as ort


def main(path: str, limit: int) -> None:
    """Run it as it is; weights count in the limit, inputs lie outside of the arena."""
    ort.set_default_logger_severity(4)
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    settings = {
        "max_mem": limit,
        "arena_extend_strategy": 1,
        "initial_chunk_size_bytes": -1,
        "max_dead_bytes_per_chunk": 1,
    }
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(settings))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    inputs = {}
    for one in session.get_inputs():
        if "int64" in one.type:
            inputs[one.name] = random.integers(0, 30, one.shape)
        else:
            inputs[one.name] = random.normal(size=one.shape).astype(np.float32)
    for _ in range(2):
        session.run(None, inputs)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

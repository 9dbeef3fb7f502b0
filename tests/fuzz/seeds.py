"""Writes the corpus with gpumem itself; inputs that once failed stay as they are."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gpumem
import gpumem.observe
from gpumem import interop
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.debugging import DebugHeapOptions
from gpumem.interop.descriptors import SemaphoreType

from .structure import PAGE_START as START
from .structure import PAGE_STRIDE as STRIDE
from .targets import CORPUS

Seed = tuple[str, bytes]


def _events(folder: Path) -> Iterator[Seed]:
    path = folder / "events"
    arena = gpumem.Arena("host", {"backing": "regions"}, name="cache")
    other = gpumem.Arena("host/host_accessible")
    stream = gpumem.Stream("host")
    with gpumem.observe.record(path=path):
        with gpumem.observe.tag("weights"):
            kept = arena.allocate(1000)
        with arena.allocate(2000, stream=stream) as shared:
            shared.record_stream(gpumem.Stream("host"))
        other.allocate(70_000).close()
    data = _with_a_stack(path.read_bytes())
    end = 96 + len(data[96:].rstrip(b"\0")) // 48 * 48 + 48
    yield "events", data[:end]
    yield "torn", data[: end - 20]
    yield "empty", data[:96]
    snapshot = gpumem.observe.snapshot()
    yield "snapshot", json.dumps(_smaller(snapshot.as_dict())).encode()
    with gpumem.observe.record(arena) as recording, gpumem.observe.tag("a"):
        more = [arena.allocate(5000) for _ in range(2)]
    yield "pickle", pickle.dumps(arena.snapshot().to_torch(recording.events()), 2)
    yield "segments", pickle.dumps(arena.snapshot().to_torch(), 4)
    del kept, more


def _with_a_stack(data: bytes) -> bytes:
    """Give the first allocation a stack, without the paths of this machine."""
    text = b'[["train.py", 3, "step"]]'
    part = text.ljust(40, b"\0") + struct.pack("<BBHHH", 255, 5, 0, 1, len(text))
    first = next(at for at in range(96, len(data), 48) if data[at + 40] == 1)
    return data[:first] + part + data[first : first + 46] + b"\1\0" + data[first + 48 :]


def _smaller(plain: dict[str, Any]) -> dict[str, Any]:
    """Leave out most free blocks and pages."""
    for resource in plain["resources"]:
        resource["blocks"] = resource["blocks"][:6]
        resource["pages"] = resource["pages"][:2]
    return plain


def _npz() -> bytes:
    columns = {
        "action": np.array([0, 0, 1, 2, 2, 0], np.int8),
        "block": np.array([0, 1, 0, 0, -1, 2], np.int32),
        "size": np.array([1000, 4096, 1000, 1000, 77, 1 << 20], np.int64),
        "stream": np.array([0, 1, 0, 0, 1, 2], np.int16),
        "time_us": np.array([0, 3, 4, 9, 9, 11], np.int64),
        "step_start": np.array([0, 3], np.int64),
        "meta": np.array(json.dumps({"source": "seed", "peak_reserved": 1 << 21})),
    }
    file = io.BytesIO()
    np.savez_compressed(file, **columns)  # type: ignore[arg-type]
    return file.getvalue()


_RMM = b"""Thread,Time,Action,Pointer,Size,Stream
139,23:59:59.999998,allocate,0x7f0000000000,4096,0x0
139,00:00:00:000001,allocate,0x7f0000001000,100,0x2
140,00:00:00.000005,allocate failure,(nil),1099511627776,0x2
139,00:00:01,free,0x7f0000000000,4096,0x0
"""
_STATS = b"""1024,stats.csv
#name,input_sizes,initializers_sizes,total_dynamic_sizes,total_temp_allocations
relu_7,8,0,8,100
MatMul_9223372036854775808,0,4096,512,0
"""


def _models() -> Iterator[Seed]:
    from onnx import TensorProto, helper

    def value(name: str, *shape: Any) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    weight = helper.make_tensor("w", TensorProto.FLOAT, (4, 4), [0.5] * 16)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="mul"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Constant", [], ["c"], value_floats=[1.0, 2.0]),
        helper.make_node("Shape", ["b"], ["s"]),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", "n", 4)], [value("b", "n", 4)], [weight])
    yield "matmul", helper.make_model(graph).SerializeToString()
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["t"])], "then", [], [value("t", 4)]
    )
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["t"])], "else", [], [value("t", 4)])
    condition = helper.make_tensor_value_info("k", TensorProto.BOOL, ())
    node = helper.make_node("If", ["k"], ["y"], then_branch=branch, else_branch=other)
    graph = helper.make_graph([node], "g", [condition, value("x", 4)], [value("y", 4)])
    yield "branches", helper.make_model(graph).SerializeToString()
    function = helper.make_function(
        "own",
        "Twice",
        ["p"],
        ["q"],
        [helper.make_node("Add", ["p", "p"], ["q"])],
        [helper.make_opsetid("", 18)],
    )
    graph = helper.make_graph(
        [helper.make_node("Twice", ["x"], ["y"], domain="own")],
        "g",
        [value("x", 2)],
        [value("y", 2)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    yield (
        "function",
        helper.make_model(graph, functions=[function], opset_imports=opsets).SerializeToString(),
    )


def _handles() -> Iterator[Seed]:
    arena = gpumem.Arena("host")
    tensor = gpumem.from_dlpack(arena.allocate(4096, shareable=True))
    for name, part in (("bytes", tensor), ("floats", tensor.view("float32")[3:100:2])):
        with interop.export(part, read_only=name == "floats") as handle:
            yield name, b"\0" + pickle.dumps((handle.kind, handle.contents))
    yield "timeline", b"\2" + pickle.dumps((SemaphoreType.HOST_TIMELINE, None))


def _pages() -> Iterator[Seed]:
    with interop.HostTimeline.create(4) as timeline, timeline.export() as handle:
        data = os.pread(handle.fileno(), 4096, 0)
    yield "used", b"\0" + data
    yield (
        "unused",
        b"\0" + struct.pack("<QQ", 1, 1).ljust(128, b"\0") + struct.pack("<II", 0x4C544D47, 1),
    )


def _live() -> Iterator[Seed]:
    header = struct.pack("<8sIIIIIIQ", b"gpumemTP", 1, START, STRIDE, 256, 112, 100, os.getpid())
    resource = struct.pack("<QQ32s24s64s15Q", 3, 1, b"host:0", b"arena", b"cache", *range(15))
    budgets = b"".join(
        struct.pack("<QQ64s4Q", number, parent, b"job", 900, 1000, 1 << 63, 950)
        for number, parent in ((1, 0), (2, 1))
    )
    rest = resource * 2 + budgets
    copies = b""
    for update in (1, 2):
        body = (
            struct.pack("<IQQQIIII", 48 + len(rest), update, 1_700_000_000 * 10**9, 5, 2, 2, 0, 1)
            + rest
        )
        copies += (struct.pack("<I", zlib.crc32(body)) + body).ljust(STRIDE, b"\0")
    yield "page", (header.ljust(START, b"\0") + copies)[: START + STRIDE + 900]
    yield "older", (header.ljust(START, b"\0") + copies)[: START + STRIDE]


def _settings() -> Iterator[Seed]:
    arena = ArenaConfig().to_mapping()
    given: dict[str, Any] = {
        "arena": {"arena": arena, "arena_text": ArenaConfig(max_mem=1 << 30).to_text()},
        "pool": {"pool": PoolConfig().to_mapping(), "heap": DebugHeapOptions().to_mapping()},
        "session": {
            "session": {
                "ep.host.use_ep_level_unified_stream": "1",
                "user_compute_stream": "0x10",
                "ep.host.arena.max_mem": 1 << 30,
                "arena.oom_wait_ms": 5,
            }
        },
        "external": {"session": {"external_allocator": {"<tuple>": [4096, 8192]}}},
        "parts": {"session": {"gpu_external_alloc": "4096", "gpu_external_free": "0x2000"}},
        "environment": {
            "environment": {
                "ep_factory.host.arena.max_mem": "1048576",
                "ep.cuda:0.arena.split_rule": "ort",
                "arena.stream_reuse": "wait",
                "ep.cuda:1/managed.max_mem": {"<int>": 70},
            }
        },
        "make": {"make": {"backing": "regions", "max_mem": 1 << 22, "split_rule": "ort"}},
        "names": {"name": "cuda:0/host_accessible", "size": "1.5 KiB", "setting": "1024,"},
    }
    for name, value in given.items():
        yield name, json.dumps(value).encode()


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """Yield target, name and content of each input."""
    with tempfile.TemporaryDirectory() as folder:
        made = dict(_events(Path(folder)))
    yield from (("recording", name, made[name]) for name in ("events", "torn", "empty"))
    yield "snapshot", "snapshot", made["snapshot"]
    yield "torch_snapshot", "history", made["pickle"]
    yield "torch_snapshot", "segments", made["segments"]
    yield "npz", "columns", _npz()
    yield "rmm_log", "log", _RMM
    yield "statistics", "stats", _STATS
    models = dict(_models())
    for target, found in (
        ("onnx_model", models.items()),
        ("handle", _handles()),
        ("timeline", _pages()),
        ("page", _live()),
        ("settings", _settings()),
    ):
        yield from ((target, name, data) for name, data in found)
    yield "environment", "options", DebugHeapOptions().to_text().encode() + b"\n0"
    yield "environment", "on", b"1\n2"
    for number, (line, content) in enumerate(
        (
            (b"report @", made["events"]),
            (b"report --json @", made["snapshot"]),
            (b"replay --device host --json @", _npz()),
            (b"replay --device host @", _RMM),
            (b"report @", made["pickle"]),
            (b"plan --budget 1MiB @", models["matmul"]),
            (b"plan --json --weights @", models["branches"]),
            (b"plan --dim n=3 @", models["matmul"]),
        )
    ):
        yield "command", f"{number}", line + b"\n" + content


def main() -> None:
    for target, name, data in seeds():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.bin").write_bytes(data)
        print(f"{target}/{name}: {len(data)} bytes")


if __name__ == "__main__":
    main()

"""Every public callable, with a wrong value for each parameter in turn: errors of known kinds."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from pathlib import Path

import numpy as np
import pytest

import gpumem
from gpumem import accounting, adaptors, interop, observe, planning, stats, traces

WRONG = (None, object(), float("nan"), "x", -1, 2**70, [], b"", [object()], {"x": object()})

# Errors of Python that a docstring names, and that programs catch by these names.
DOCUMENTED = {
    "Accountants.__getitem__": KeyError,  # as every Mapping
    "Arena.sleep": OSError,
    "Buffer.__dlpack__": BufferError,
    "ModelGraph.from_onnx": OSError,
    "Session.bind_output": BufferError,
    "Snapshot.load": OSError,
    "Snapshot.resource": LookupError,
    "Snapshot.save": OSError,
    "Tensor.__dlpack__": BufferError,
    "Tensor.__getitem__": IndexError,
    "Tensor.__setitem__": (IndexError, OverflowError),
    "Tensor.export_as": BufferError,
    "Tensor.fill": OverflowError,
    "VirtualTensor.__dlpack__": BufferError,
    "AdHocAccountant": OverflowError,  # more bytes than 64 bits hold
    "ResourceCount.exceeds": OverflowError,
    "ResourceCount.from_bytes": OverflowError,
    "StatsAccountant": OverflowError,
    "Recording": OSError,
    "load_trace": OSError,
    "load_traces": OSError,
    "read": OSError,
    "read_stats": OSError,
    "replay": OSError,
}
SKIPPED = {
    "set_host_device_count": "it changes the devices of the whole process",
    "TimelinePoint.wait": "None waits for ever, as it should",
    "wait_events": "the same",
}


def small_graph():
    builder = planning.GraphBuilder()
    x = builder.input("x", "float32", (4,))
    builder.node("Relu", [x], [builder.value("y", "float32", (4,))])
    return builder.build(["y"])


@pytest.fixture(scope="module", autouse=True)
def no_node_left():
    """Remove the page of the node that a budget with a wrong value for `node` makes."""
    yield
    Path(f"/dev/shm/gpumem-node-{os.geteuid()}-x").unlink(missing_ok=True)


ARENA = gpumem.Arena("host", name="every")
GRAPH = small_graph()
PLACEMENT = planning.partition(GRAPH, ["host"])
COPIES = planning.plan_copies(PLACEMENT)

# Right values by the names of parameters that are needed, and objects with methods.
RIGHT = {
    "memory": "host", "device": "host", "reader": "host", "given": "host", "peer": "host",
    "nbytes": 256, "shape": (4,), "dtype": "f4", "x": np.ones(3), "dst": np.zeros(3),
    "src": np.ones(3), "fill_value": 1, "value": 0, "resource": ARENA, "first": ARENA,
    "second": ARENA, "limit": 1000, "graph": GRAPH, "devices": ["host"], "placement": PLACEMENT,
    "node": GRAPH.nodes[0], "nodes": GRAPH.nodes, "mapping": {}, "stats": {}, "inputs": [],
    "outputs": [], "op_type": "Relu", "name": "n", "n": 1, "rows": 1, "last": 1, "key": 0,
    "what": gpumem.zeros(3, "f4", memory="host"), "percent": 100, "handle": 1, "fd": -5,
    "message": "m", "call": "c", "code": 1, "advice": "read_mostly", "dlpack_device": "cpu",
    "copies": COPIES, "path": "not_there", "source": "not_there", "trace": "not_there",
    "model": "not_there.onnx", "text": "",
}  # fmt: skip
OBJECTS = {
    "Arena": lambda: gpumem.Arena("host"),
    "Buffer": lambda: ARENA.allocate(64),
    "Tensor": lambda: gpumem.zeros((2, 3), "i4", memory="host"),
    "VirtualTensor": lambda: ARENA.virtual((8, 64), "i4", committed=2),
    "DriverPool": lambda: gpumem.DriverPool("host"),
    "Budget": lambda: gpumem.Budget(1000),
    "Reservation": lambda: gpumem.Budget(1000).reserve(10),
    "Stream": lambda: gpumem.Stream("host"),
    "Event": lambda: gpumem.Event("host"),
    "Device": lambda: gpumem.Device("host"),
    "MemoryInfo": lambda: gpumem.MemoryInfo("host"),
    "Environment": gpumem.Environment,
    "Session": lambda: gpumem.Session("host"),
    "SessionOptions": gpumem.SessionOptions,
    "ArenaConfig": gpumem.ArenaConfig,
    "PoolConfig": gpumem.PoolConfig,
    "GraphBuilder": planning.GraphBuilder,
    "ModelGraph": small_graph,
    "Node": lambda: GRAPH.nodes[0],
    "Placement": lambda: PLACEMENT,
    "CopyPlan": lambda: COPIES,
    "MemoryPlan": lambda: planning.plan_memory(PLACEMENT),
    "Snapshot": ARENA.snapshot,
    "Recording": lambda: observe.record(gpumem.Arena("host")),
    "Events": lambda: observe.record(gpumem.Arena("host")).stop(),
    "LimitAdaptor": lambda: adaptors.limit(ARENA, 1000),
    "FallbackAdaptor": lambda: adaptors.fallback(ARENA, gpumem.DriverPool("host")),
    "AdHocAccountant": lambda: accounting.AdHocAccountant(1000),
    "StatsRecorder": accounting.StatsRecorder,
    "ResourceCount": lambda: accounting.ResourceCount.from_bytes(5),
    "Accountants": accounting.Accountants,
    "HostTimeline": lambda: interop.HostTimeline.create(0),
    "TimelinePoint": lambda: interop.TimelinePoint(interop.HostTimeline.create(0), 1),
    "Importer": lambda: interop.Importer("host"),
    "TraceBuilder": traces.TraceBuilder,
    "Handle": lambda: interop.export(gpumem.zeros(3, "f4", memory="host", shareable=True)),
    "OutOfMemoryReport": lambda: stats.OutOfMemoryReport("host", 1, 2),
}
PROTOCOLS = ("__getitem__", "__setitem__", "__dlpack__")


def public_callables():
    """Return the callables that public modules name, and their classes' own constructors."""
    found = {}
    for info in [None, *pkgutil.walk_packages(gpumem.__path__, "gpumem.")]:
        module = gpumem
        if info is not None:
            parts = info.name.split(".")
            if any(part.startswith("_") for part in parts) or parts[1] in ("cli", "integrations"):
                continue  # programs; and what needs other libraries
            module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", ()):
            each = getattr(module, name)
            if callable(each):
                found[name] = lambda each=each: each
            for method, raw in vars(each).items() if inspect.isclass(each) else ():
                if isinstance(raw, classmethod | staticmethod) and not method.startswith("_"):
                    found[f"{name}.{method}"] = lambda each=each, method=method: getattr(
                        each, method
                    )
    for name, make in OBJECTS.items():
        for method in dir(type(make())):
            is_public = not method.startswith("_") or method in PROTOCOLS
            if is_public and inspect.isroutine(getattr(type(make()), method)):
                found.setdefault(
                    f"{name}.{method}", lambda make=make, method=method: getattr(make(), method)
                )
    return {
        name: get
        for name, get in found.items()
        if name not in SKIPPED and not name.endswith("_raw")  # users write those
    }


CALLABLES = public_callables()


def bytes_of_arena():
    ARENA.shrink()  # pages of virtual tensors that have ended are released
    return ARENA.stats().in_use, ARENA.stats().virtual


def calls_of(function, parameters):
    """Return the arguments of calls with one wrong value."""
    for wrong_one in parameters:
        for wrong in WRONG:
            by_place, by_name = [], {}
            for each in parameters:
                value = wrong if each is wrong_one else RIGHT.get(each.name)
                if each.kind is each.POSITIONAL_ONLY:
                    by_place.append(value)
                elif each is wrong_one or each.default is each.empty:
                    by_name[each.name] = value
            yield by_place, by_name


@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_wrong_value_of_any_parameter_is_an_error_of_gpumem_or_of_the_type(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    get = CALLABLES[name]
    try:
        signature = inspect.signature(get())
    except ValueError:
        return  # of Python's own exceptions, and of classes that refuse to be called
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [each for each in signature.parameters.values() if each.kind not in variadic]
    documented = DOCUMENTED.get(name, ())
    allowed = (gpumem.GpumemError, TypeError, ValueError)
    allowed += documented if isinstance(documented, tuple) else (documented,)
    before = bytes_of_arena()
    for by_place, by_name in calls_of(get(), parameters):
        made = None
        try:
            made = get()(*by_place, **by_name)
        except allowed:
            pass
        except Exception as error:
            error.add_note(f"{name}({by_place}, {by_name})")
            raise
        if isinstance(made, observe.Recording):
            made.stop()
        if isinstance(made, observe.Publication):
            made.close()
        del made
    assert bytes_of_arena() == before

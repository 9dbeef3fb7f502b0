"""Arguments of a wrong type or out of range: an error that names the value, and nothing changed."""

import numpy as np
import pytest

import gpumem
from gpumem import MemoryInfo, observe
from gpumem._events.events import HEADER_BYTES
from gpumem.accounting import Accountants, AdHocAccountant, accountants_from_setting
from gpumem.errors import EventFileError, ModelGraphError, SnapshotError
from gpumem.observe import Snapshot
from gpumem.planning import GraphBuilder, MemoryPlan, Target, partition, plan_copies, plan_memory


def small_graph():
    builder = GraphBuilder()
    x = builder.input("x", "float32", (4,))
    builder.node("Relu", [x], [builder.value("y", "float32", (4,))])
    return builder.build(["y"])


GRAPH = small_graph()
ACCOUNTANT = AdHocAccountant(1000)
PLAN = plan_memory(partition(GRAPH, ["host"]))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: gpumem.empty(3, "f4", environment=5), "environment = 5: expected an Environment"),
        (lambda: observe.snapshot().diff(5), "other = 5: expected a Snapshot"),
        (lambda: plan_memory(5), "placement = 5: expected a Placement.* or a CopyPlan"),
        (lambda: plan_copies(5), "placement = 5: expected a Placement"),
        (
            lambda: gpumem.zeros(3, "float32").to("host", copy="x"),
            "copy = 'x': expected True, False or None",
        ),
        (lambda: PLAN.tensors(5), "memory = 5: expected a MemoryResource, an ExternalMemory"),
        (lambda: ACCOUNTANT.cost(5), "node = 5: expected a node"),
        (lambda: ACCOUNTANT.account(None), "node = None: expected a node"),
        (lambda: ACCOUNTANT.commit([*GRAPH, "x"]), "node = 'x': expected a node"),
        (lambda: accountants_from_setting(5), "setting = 5: expected a str or None"),
        (lambda: Accountants(5), "accountants = 5: expected a Mapping"),
        (lambda: partition(GRAPH, ["host"], [ACCOUNTANT]), "accountants = .* a Mapping"),
        (lambda: partition(5, ["host"]), "graph = 5: expected a ModelGraph"),
        (lambda: partition(GRAPH, "host"), "devices = 'host': expected an iterable of devices"),
        (lambda: partition(GRAPH, 5), "devices = 5: expected an iterable of devices"),
        (lambda: Target("host", supports=5), "supports = 5: expected a callable or None"),
        (lambda: Target("host", fuse=5), "fuse = 5: expected a callable or None"),
        (lambda: Target("host", relayout=5), "relayout = 5: expected a callable or None"),
        (
            lambda: Target("host", host_accessible="x"),
            "host_accessible = 'x': expected True, False",
        ),
        (lambda: MemoryInfo("host", alignment="x"), "alignment = 'x': expected a power of two"),
        (lambda: MemoryInfo("host", alignment=True), "alignment = True: expected a power of two"),
        (lambda: MemoryInfo("host", name=5), "name = 5: expected a str"),
        (lambda: gpumem.Arena("host", name=5), "name = 5: expected a str"),
        (
            lambda: gpumem.adaptors.limit(gpumem.Arena("host"), 9, name=5),
            "name = 5: expected a str",
        ),
        (lambda: gpumem.Budget(1, name=5), "name = 5: expected a str"),
        (
            lambda: gpumem.from_dlpack(np.ones(3), copy="yes"),
            "copy = 'yes': expected True, False or None",
        ),
        (lambda: observe.record(native="x"), "native = 'x': expected True or False"),
        (lambda: observe.record("run.rec"), "'run.rec': expected a Mem.*; a path goes to path="),
        (
            lambda: gpumem.SessionOptions(user_compute_stream=float("nan")),
            "nan is not a stream: expected None, a gpumem.Stream, an integer handle",
        ),
        (lambda: gpumem.OutOfMemoryError("x", report=5), "report = 5: expected an OutOfMemoryR"),
        (lambda: gpumem.OutOfMemoryError.of(None), "report = None: expected an OutOfMemoryReport"),
        (lambda: gpumem.PoolConfig.from_arena(5), "config = 5: expected an ArenaConfig"),
        (lambda: gpumem.ArenaConfig.from_text(5), "text = 5: expected a str"),
        (lambda: Snapshot([5], 0, 0), "value of resources = 5: expected a ResourceSnapshot"),
        (lambda: MemoryPlan(5, None, "auto", 256), "copies = 5: expected a CopyPlan"),
        (lambda: GraphBuilder().build([5]), "value of outputs = 5: expected a Value or a name"),
        (lambda: GraphBuilder().build("y"), "outputs = 'y': expected an iterable, each of it a V"),
        (lambda: gpumem.Arena(), r"^Arena\(memory\): give a memory such as 'cuda:0' or 'host'$"),
        (
            lambda: gpumem.Arena("host", {}, 3),
            r"^Arena\(\) takes by position only memory, config, and 3 were given$",
        ),
        (lambda: gpumem.Budget(), r"^Budget\(limit\): give bytes such as '20GiB', or None"),
        (lambda: gpumem.Budget(1, 2), r"^Budget\(\) takes by position only limit, and 2 were"),
        (
            lambda: gpumem.Budget(1, on_presure=print),
            r"^unknown keyword 'on_presure': did you mean 'on_pressure'\? Budget\(\) takes limit",
        ),
        (
            lambda: gpumem.Arena("host").virtual(4, "f4", commited=1),
            r"^unknown keyword 'commited': did you mean 'committed'\? virtual\(\) takes shape",
        ),
        (lambda: gpumem.zeros(2), r"^zeros\(shape, dtype\): dtype is missing"),
        (lambda: gpumem.empty(2, memory="host"), r"^empty\(shape, dtype\): dtype is missing"),
        (
            lambda: gpumem.zeros(2, "f4", device="host"),
            r"unknown keyword 'device': did you mean 'memory'\? zeros\(\) takes shape, dtype, mem",
        ),
        (
            lambda: gpumem.full(2, 1, arena=gpumem.Arena("host")),
            r"'arena': did you mean 'resource'\? full\(\) takes shape, fill_value, dtype, memory",
        ),
    ],
)
def test_wrong_type_is_refused_with_value_and_accepted_types(call, told):
    with pytest.raises(TypeError, match=told):
        call()
    assert (ACCOUNTANT.pending, ACCOUNTANT.consumed) == (0, 0)


def test_refused_recording_records_nothing():
    arena = gpumem.Arena("host")
    with pytest.raises(TypeError, match=r"native"):
        observe.record(arena, native=1)
    observe.record(arena).stop()  # nobody else records it


def test_shareable_must_be_a_bool(arena):
    before = arena.stats()
    pool = gpumem.DriverPool("host")
    for resource in (arena, pool):
        with pytest.raises(TypeError, match=r"shareable = 'x': expected True or False"):
            resource.allocate(10, shareable="x")
    assert arena.stats() == before


def test_memory_info_alignment_is_at_most_1_gib():
    assert MemoryInfo("host", alignment=np.int64(1 << 30)).alignment == 1 << 30
    with pytest.raises(ValueError, match=r"alignment \d+ is not a power of two from 1 to 2\*\*30"):
        MemoryInfo("host", alignment=1 << 70)


def test_soft_limit_must_not_exceed_the_limit():
    with pytest.raises(ValueError, match=r"soft = 200 B: expected 0 to the limit, 100 B"):
        gpumem.Budget(100, soft=200)
    budget = gpumem.Budget(100, soft=100)
    with pytest.raises(ValueError, match=r"soft = 101 B: expected 0 to the limit, 100 B"):
        budget.soft = 101
    assert budget.soft == 100
    budget.soft = None
    assert (budget.soft, gpumem.Budget(None, soft=200).soft) == (None, 200)


def test_bind_output_rejects_what_is_no_array():
    with gpumem.Session("host") as session:
        for nothing in (5, [1.0, 2.0]):
            with pytest.raises(TypeError, match=r"invalid memory of type .*: expected"):
                session.bind_output("y", nothing)
        assert session.copy_plan() == {}


@pytest.mark.parametrize("given", [None, 5, [5], [[5]], ["Relu"]])
def test_fuse_must_return_groups_of_nodes(given):
    with pytest.raises(ModelGraphError, match=r"host:0 proposes"):
        partition(GRAPH, [Target("host", fuse=lambda nodes: given)])


@pytest.mark.parametrize("shape", ["abc", 5])
def test_graph_value_shape_must_be_a_sequence_of_lengths(shape):
    builder = GraphBuilder()
    with pytest.raises(ModelGraphError, match=rf"shape {shape!r} of 'x' is not a sequence"):
        builder.input("x", "f4", shape)
    assert builder.input("x", "f4", ("batch", 3)).shape == ("batch", 3)


@pytest.mark.parametrize("kept", [3, 10, 63, 64, HEADER_BYTES - 1])
def test_recording_cut_in_its_header_is_reported_as_torn(tmp_path, kept):
    path = tmp_path / "events"
    observe.record(path=path).stop()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(EventFileError, match=rf"torn within its header: it has {kept} of"):
        observe.read(path)


@pytest.mark.parametrize("data", [b"", b"gpx", b"no events"])
def test_short_foreign_file_is_not_reported_as_torn(tmp_path, data):
    path = tmp_path / "events"
    path.write_bytes(data)
    with pytest.raises(EventFileError, match=r"does not begin with gpumemEV"):
        observe.read(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda plain: plain.update(resources={}), "resources = {}: expected list"),
        (lambda plain: plain.update(stacks={}), "stacks = {}: expected list"),
        (lambda plain: plain["resources"][0].update(name=5), "name = 5: expected str"),
        (lambda plain: plain["resources"][0].update(key="x"), "key = 'x': expected int"),
        (
            lambda plain: plain["resources"][0].update(parent="x"),
            "parent = 'x': expected int or None",
        ),
        (lambda plain: plain["resources"][0].update(blocks={}), "blocks = {}: expected list"),
    ],
)
def test_snapshot_key_of_a_wrong_type_is_refused_by_name(change, told):
    plain = gpumem.Arena("host").snapshot().as_dict()
    Snapshot.from_dict(plain)
    change(plain)
    with pytest.raises(SnapshotError, match=told):
        Snapshot.from_dict(plain)

"""Session: bindings, copies and their absence, runs, streams, allocators."""

from __future__ import annotations

import gc
import threading
import types
import weakref

import numpy as np
import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.graph import Graph
from helpers.resources import Plain
from helpers.single_block import BLOCK, next_address, single_block_arena
from helpers.threads import in_threads, running
from helpers.waiting import wait_until
from session.test_order import assert_unfinished

import gpumem
from gpumem.device import decide_copy
from gpumem.interop import HostTimeline

COPIES = [
    "cuMemcpyAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpy2DAsync",
    "cuMemcpy3DAsync",
]


def double(ctx):
    x = ctx.inputs["x"]
    y = ctx.output("y", x.shape, x.dtype)
    np.multiply(x.numpy(), 2, out=y.numpy())


@pytest.fixture
def session():
    with gpumem.Session("host") as session:
        session.bind_input("x", np.arange(4, dtype="f4"))
        yield session


def copies_issued(host):
    return sum(host.call_count(name) for name in COPIES)


# ---- copy or not ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "memory", "action"),
    [
        ("cuda:0", "cuda:0", "alias"),
        ("cuda:0", "cuda:1", "copy"),
        ("cuda:0", "cuda:0/host_accessible", "alias"),
        ("cuda:0", "cuda:1/host_accessible", "copy"),
        ("cuda:0", "cuda:0/managed", "alias"),
        ("cuda:0", "cuda:1/managed", "copy"),
        ("cuda:0", "host", "copy"),
        ("host", "host", "alias"),
        ("host:0", "host:1", "alias"),
        ("host", "cuda:0/host_accessible", "alias"),
        ("host", "cuda:0/managed", "alias"),
        ("host", "cuda:0", "copy"),
    ],
)
def test_copy_is_omitted_only_for_shared_and_accessible_memory(device, memory, action):
    decision = decide_copy(gpumem.Device(device), gpumem.MemoryInfo.parse(memory))
    assert decision.action == action
    assert memory in decision.why


def test_compatible_memory_that_the_device_cannot_access_is_copied(monkeypatch):
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    decision = decide_copy(gpumem.Device("host"), gpumem.MemoryInfo.parse("host"))
    assert decision.action == "copy"
    assert "cannot access" in decision.why


def test_copy_plan_names_every_binding(session):
    session.bind_output("y", "host/host_accessible")
    plan = session.copy_plan()
    assert {name: each.action for name, each in plan.items()} == {"x": "alias", "y": "alias"}
    assert all(why for _, why in plan.values())


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, "host", "host/host_accessible", "host/managed"])
def test_host_accessible_outputs_need_no_copy(session, host, memory):
    session.bind_output("y", memory)
    host.reset_counts()
    session.run(double)
    tensor = session.outputs()["y"]
    view = tensor.numpy()
    assert copies_issued(host) == 0
    assert view.ctypes.data == tensor.ptr
    assert view.tolist() == [0, 2, 4, 6]
    assert tensor.memory == session.allocator(memory).memory
    del tensor
    session.close()
    gc.collect()
    assert view.tolist() == [0, 2, 4, 6]


def test_bound_array_is_written_in_place(session, host):
    array = np.zeros(4, "f4")
    session.bind_output("y", array)
    host.reset_counts()
    session.run(double)
    assert array.tolist() == [0, 2, 4, 6]
    assert copies_issued(host) == 0
    assert session.outputs()["y"].ptr == array.ctypes.data


def test_bound_resource_allocates_the_output(session):
    resource = Plain("host/managed")
    session.bind_output("y", resource)
    session.run(double)
    assert session.outputs()["y"].buffer.resource is resource


def test_inputs_and_outputs_are_copied_where_memory_is_not_shared(session, monkeypatch):
    kinds = gpumem.MemoryKind
    monkeypatch.setattr(
        "gpumem.device.can_access", lambda reader, memory: memory.kind is not kinds.MANAGED
    )
    x = gpumem.full(4, 3, "f4", memory="host/managed")
    y = gpumem.zeros(4, "f4", memory="host/managed")
    session.bind_input("x", x)
    session.bind_output("y", y)
    assert [each.action for each in session.copy_plan().values()] == ["copy", "copy"]
    seen = []

    def work(ctx):
        seen.append((ctx.inputs["x"].memory.kind, ctx.output("y", 4, "f4").memory.kind))
        double(ctx)

    session.run(work)
    assert seen == [(kinds.HOST, kinds.HOST)]
    assert y.numpy().tolist() == [6] * 4
    assert session.outputs()["y"] is y


def test_copy_stream_is_ordered_around_the_work(monkeypatch, host, driver):
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    host.set_lag(2_000_000)
    with gpumem.Session("host", {"do_copy_in_default_stream": "0"}) as session:
        assert session.copy_stream != session.compute_stream
        session.bind_input("x", gpumem.full(4096, 3, "u1", memory="host"))
        session.bind_output("y", gpumem.zeros(4096, "u1", memory="host"))

        def work(ctx):
            y = ctx.output("y", 4096, "u1")
            driver.fill(y.buffer, 7, ctx.stream)

        session.run(work)
        assert (session.outputs()["y"].numpy() == 7).all()


def test_output_copy_on_the_copy_stream_waits_for_the_work(monkeypatch, host):
    driver, gates = HostDriver(), []
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    target = gpumem.zeros(4096, "u1", memory="host")
    with gpumem.Session("host", {"do_copy_in_default_stream": "0"}) as session:
        session.bind_output("y", target)

        def work(ctx):
            y = ctx.output("y", 4096, "u1")
            gates.append(driver.block(ctx.stream))
            driver.fill(y.buffer, 7, ctx.stream)

        session.run(work, synchronize=False)
        with gates[0]:
            assert not session.copy_stream.query()
            assert (target.numpy(sync=False) == 0).all()
        session.compute_stream.synchronize()  # comes after the copy
        assert (target.numpy(sync=False) == 7).all()


def test_later_work_of_the_stream_follows_the_output_copy(monkeypatch, host):
    driver, done = HostDriver(), []
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    with gpumem.Session("host", {"do_copy_in_default_stream": "0"}) as session:
        session.bind_output("y", gpumem.zeros(4096, "u1", memory="host"))

        def work(ctx):
            driver.fill(ctx.output("y", 4096, "u1").buffer, 7, ctx.stream)
            done.append(ctx.stream.record())

        with driver.block(session.copy_stream):
            session.run(work, synchronize=False)
            done[0].synchronize()
            assert not session.compute_stream.query()
        session.compute_stream.synchronize()


def assert_run_reads_threes(session, x):
    """Work on the stream of a run reads the threes of an input."""
    session.bind_input("x", x)
    seen = []

    def work(ctx):
        ctx.stream.synchronize()
        seen.append((ctx.inputs["x"].numpy(sync=False) == 3).all())

    session.run(work)
    assert seen == [True]


def test_copied_inputs_are_ready_for_work_on_the_stream(monkeypatch, host):
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    host.set_lag(5_000_000)
    with gpumem.Session("host", {"do_copy_in_default_stream": "0"}) as session:
        assert_run_reads_threes(session, gpumem.full(4096, 3, "u1", memory="host"))


def test_input_with_queued_writes_is_waited_for(host, stream):
    host.set_lag(2_000_000)
    x = gpumem.full(4096, 3, "u1", memory="host", stream=stream)
    with gpumem.Session("host") as session:
        assert_run_reads_threes(session, x)


def test_each_run_reads_current_inputs(session):
    x = np.zeros(4, "f4")
    session.bind_input("x", x)
    session.bind_output("y")
    for value in (1, 2):
        x[:] = value
        session.run(double)
        assert session.outputs()["y"].numpy().tolist() == [2 * value] * 4


def test_run_context_gives_scratch_and_streams(session):
    seen = []
    session.bind_output("y")

    def work(ctx):
        with ctx.allocator.allocate(100) as scratch:
            assert scratch.resource is session.allocator()
        seen.append((ctx.stream, ctx.allocator))
        assert ctx.output("y", 4, "f4") is ctx.output("y", (4,), np.float32)
        double(ctx)

    session.run(work)
    assert seen == [(session.compute_stream, session.allocator())]


def test_scratch_of_a_run_belongs_to_its_stream(host):
    other = gpumem.Stream("host")
    arena = gpumem.Arena("host")
    seen = []

    def work(ctx):
        allocator = ctx.allocator
        with (
            allocator.allocate(100) as scratch,
            allocator.allocate(100, other, alignment=4096) as others,
            gpumem.empty(100, "u1", resource=allocator).buffer as tensors,
            allocator.allocate_persistent(100) as weights,
        ):
            seen.extend(buffer.stream for buffer in (scratch, others, tensors))
            assert others.ptr % 4096 == 0
            for buffer in (scratch, others, tensors, weights):
                assert buffer.resource is arena
        assert (allocator.memory, allocator.name) == (arena.memory, arena.name)
        assert allocator.stats() == arena.stats()
        assert allocator.config is arena.config
        assert allocator.is_arena
        assert len(allocator.snapshot().resources) == len(arena.snapshot().resources) == 1
        allocator.reset_stream(other)
        assert allocator.shrink().released_bytes > 0
        assert not allocator.closed

    with gpumem.Environment() as environment:
        environment.register("host", arena)
        with gpumem.Session("host", environment=environment) as session:
            session.run(work)
            assert seen == [session.compute_stream, other, session.compute_stream]
    arena.close()


def test_run_waits_for_its_work(session, virtual_clock, driver):
    virtual_clock.set_lag(5_000_000)
    session.bind_output("y", "host/host_accessible")

    def work(ctx):
        driver.fill(ctx.output("y", 4096, "u1").buffer, 7, ctx.stream)

    session.run(work)
    assert (session.outputs()["y"].numpy(sync=False) == 7).all()
    session.run(work, synchronize=False)
    assert not session.compute_stream.query()
    session.compute_stream.synchronize()


# ---- memory of runs that are not waited for ------------------------------------------------------


def run_behind_a_gate(session, outputs=("y",), fails=False):
    """Run without waiting; returns the gate that holds the run's work back."""
    driver, gates = HostDriver(), []

    def work(ctx):
        gates.append(driver.block(ctx.stream))
        for name in outputs:
            driver.fill(ctx.output(name, 4096, "u1").buffer, 7, ctx.stream)
        if fails:
            raise KeyError("after work was queued")

    try:
        session.run(work, synchronize=False)
    except KeyError:
        assert fails
    return gates[0]


@pytest.mark.parametrize("fails", [False, True])
def test_unfinished_run_retains_its_inputs_and_outputs(host, fails):
    arena, side = gpumem.Arena("host"), gpumem.Stream("host")
    x, y = (gpumem.zeros(4096, "u1", resource=arena, stream=side) for _ in range(2))
    side.synchronize()
    used = {x.ptr, y.ptr}
    session = gpumem.Session("host")
    session.bind_input("x", x)
    session.bind_output("y", y)
    with run_behind_a_gate(session, fails=fails):
        session.close()
        del x, y, session
        made = [arena.allocate(4096, side) for _ in range(4)]
        assert not used & {block.ptr for block in made}
    gpumem.Device("host").synchronize()
    made.append(arena.allocate(arena.stats().reserved - 5 * 4096, side))  # all that is left


def test_scratch_of_an_unfinished_run_stays_its_streams(make_arena, host):
    arena, pin = single_block_arena(make_arena)
    addresses, gates = [], []

    def work(ctx):
        gates.append(HostDriver().block(ctx.stream))
        with ctx.allocator.allocate(BLOCK) as scratch:
            addresses.append(scratch.ptr)

    with gpumem.using_resource(arena), gpumem.Session("host") as session:
        session.run(work, synchronize=False)
        with gates[0]:
            assert next_address(session.allocator()) is None
            assert next_address(session.allocator(), session.compute_stream) == addresses[0]
        session.compute_stream.synchronize()
        assert next_address(session.allocator()) == addresses[0]
    pin.close()


def test_unfinished_run_retains_memory_of_other_libraries():
    array = np.zeros(4096, "u1")
    alive = weakref.ref(array)
    with gpumem.Session("host") as session:
        session.bind_input("x", array)
        gate = run_behind_a_gate(session, outputs=())
    del array, session
    with gate:
        gc.collect()
        assert alive() is not None
    gpumem.Device("host").synchronize()
    wait_until(lambda: alive() is None)


def test_unfinished_run_retains_blocks_of_a_users_resource():
    resource = Plain("host")
    x = gpumem.zeros(4096, "u1", resource=resource)
    with gpumem.Session("host") as session:
        session.bind_input("x", x)
        gate = run_behind_a_gate(session, outputs=())
    del x, session
    with gate:
        assert resource.stats().in_use == 4096
    gpumem.Device("host").synchronize()
    wait_until(lambda: resource.stats().in_use == 0)


def test_unfinished_run_retains_copies_made_on_the_copy_stream(monkeypatch):
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    options = {"do_copy_in_default_stream": "0", "private_arena": True}
    with gpumem.Session("host", options) as session:
        session.bind_input("x", gpumem.full(4096, 3, "u1", memory="host"))
        driver, seen, gates = HostDriver(), [], []

        def work(ctx):
            seen.append(ctx.inputs["x"].ptr)
            gates.append(driver.block(ctx.stream))

        session.run(work, synchronize=False)
        with gates[0]:
            session.copy_stream.synchronize()
            assert session.allocator().allocate(4096, session.copy_stream).ptr not in seen


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("closed", ["x", "y"])
def test_run_refuses_bound_memory_that_was_freed(arena, closed, graph):
    bound = {name: gpumem.zeros(4, "f4", resource=arena) for name in "xy"}
    with gpumem.Session("host", {"enable_cuda_graph": graph}) as session:
        session.bind_input("x", bound["x"])
        session.bind_output("y", bound["y"])
        session.run(double)
        bound[closed].buffer.close()
        with pytest.raises(gpumem.errors.ClosedError, match=f"'{closed}' is bound to"):
            session.run(double)
        session.bind_input("x", np.ones(4, "f4"))
        session.bind_output("y")
        session.run(double)
        assert session.outputs()["y"].numpy().tolist() == [2] * 4


@pytest.mark.parametrize("over", [lambda arena: arena, gpumem.adaptors.track])
@pytest.mark.parametrize("sleeper", ["input", "output", "output's arena", "own arena"])
def test_run_refuses_sleeping_memory_before_anything_is_queued(make_arena, host, sleeper, over):
    arena, awake = make_arena(), make_arena()
    resource = over(arena)
    own = resource if sleeper == "own arena" else awake
    with gpumem.using_resource(own), gpumem.Session("host") as session:
        x = gpumem.full(4, 3, "u1", resource=resource if sleeper == "input" else awake)
        session.bind_input("x", x)
        outputs = {"output": lambda: gpumem.zeros(4, "u1", resource=resource)}
        outputs["output's arena"] = lambda: resource
        session.bind_output("y", outputs.get(sleeper, lambda: awake)())
        calls = []

        def work(ctx):
            calls.append(1)
            gpumem.copy(ctx.output("y", 4, "u1"), ctx.inputs["x"], ctx.stream)

        session.run(work)
        first = session.outputs()["y"]
        del x
        gc.collect()
        arena.sleep()
        host.reset_counts()
        with pytest.raises(gpumem.errors.AsleepError, match="wake"):
            session.run(work)
        assert len(calls) == 1
        assert not sum(host.call_count(f"cuMemcpy{kind}Async") for kind in ("", "DtoD"))
        assert session.outputs()["y"] is first
        arena.wake()
        session.run(work)
        assert (session.outputs()["y"].numpy() == 3).all()
        assert len(calls) == 2
        del first
    resource.close()


def test_run_under_a_tag_that_is_awake_needs_no_other_tag(arena):
    with arena.tag("work"):
        arena.allocate(8).close()
    with gpumem.using_resource(arena), gpumem.Session("host") as session:
        session.bind_output("y")
        arena.sleep("default")
        with arena.tag("work"):
            session.run(lambda ctx: ctx.output("y", 4, "u1").numpy().fill(5))
            assert (session.outputs()["y"].numpy() == 5).all()
        with pytest.raises(gpumem.errors.AsleepError):
            session.run(lambda ctx: ctx.output("y", 4, "u1"))
        arena.wake()


def test_failed_run_leaves_no_memory_in_use():
    def fail(ctx):
        ctx.output("y", 4096, "u1")
        raise KeyError("mine")

    with gpumem.Session("host", {"private_arena": True}) as session:
        session.bind_output("y")
        with pytest.raises(KeyError):
            session.run(fail)
        assert session.allocator().stats().in_use == 0


def test_functions_exception_is_raised_without_a_change(session):
    session.bind_output("y")
    session.run(double)
    before = session.outputs()["y"]

    def fail(ctx):
        ctx.output("y", 2, "f4")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        session.run(fail)
    assert session.outputs()["y"] is before
    session.run(double)


def scratch_of_a_mebibyte(ctx):
    ctx.allocator.allocate(1 << 20).close()


@pytest.mark.parametrize("shrink", [True, ["host"], ("host:0", gpumem.Device("host"))])
def test_run_may_shrink_its_arena_at_the_end(shrink):
    with gpumem.Session("host", {"private_arena": True}) as session:
        session.run(scratch_of_a_mebibyte)
        arena = session.allocator()
        assert arena.stats().reserved > 0
        session.run(scratch_of_a_mebibyte, shrink=False)
        assert arena.stats().reserved > 0
        session.run(scratch_of_a_mebibyte, shrink=shrink)
        assert arena.stats().reserved == 0


def test_run_shrinks_the_named_memories_alone():
    with gpumem.Environment() as environment:
        host, pinned = (environment.register(name) for name in ("host", "host/host_accessible"))
        for arena in (host, pinned):
            arena.allocate(1000).close()
        with gpumem.Session("host", environment=environment) as session:
            session.run(scratch_of_a_mebibyte, shrink=["host/host_accessible"])
            assert (host.stats().reserved > 0, pinned.stats().reserved) == (True, 0)


def test_invalid_shrink_is_refused_before_the_run(session):
    calls = []
    for options, error in [
        ({"shrink": "host"}, TypeError),
        ({"shrink": 1}, TypeError),
        ({"shrink": ["mars"]}, ValueError),
        ({"shrink": True, "synchronize": False}, ValueError),
    ]:
        with pytest.raises(error):
            session.run(calls.append, **options)
    with gpumem.Environment() as environment:
        environment.register("host")
        with (
            gpumem.Session("host", environment=environment) as other,
            pytest.raises(gpumem.errors.NoAllocatorError),
        ):
            other.run(calls.append, shrink=["host/managed"])
    assert calls == []


def test_mismatched_or_unbound_outputs_are_refused(session):
    session.bind_output("y", np.zeros(4, "f4"))
    session.bind_output("z")
    for ask, error in [
        (lambda ctx: ctx.output("nothing", 4, "f4"), KeyError),
        (lambda ctx: ctx.output("y", 5, "f4"), ValueError),
        (lambda ctx: ctx.output("y", 4, "f8"), ValueError),
        (lambda ctx: (ctx.output("z", 4, "f4"), ctx.output("z", 5, "f4")), ValueError),
        (lambda ctx: ctx.output("z", 4, "f4"), ValueError),  # y was not asked for
    ]:
        with pytest.raises(error):
            session.run(ask)
    assert session.outputs() == {}


def test_invalid_bindings_are_refused(session):
    session.bind_output("y")
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for bind, error in [
        (lambda: session.bind_input("y", np.zeros(4)), ValueError),
        (lambda: session.bind_output("x"), ValueError),
        (lambda: session.bind_input(3, np.zeros(4)), TypeError),
        (lambda: session.bind_input("z", [1.0, 2.0]), TypeError),
        (lambda: session.bind_input("z", 3.0), TypeError),
        (lambda: session.bind_input("z", ((1, 2), (3, 4))), TypeError),
        (lambda: session.bind_output("z", frozen), BufferError),
        (lambda: session.bind_output("z", "mars"), ValueError),
    ]:
        with pytest.raises(error):
            bind()
    assert list(session.copy_plan()) == ["x", "y"]


def test_input_with_numpys_array_interface_alone_is_bound_without_a_copy(session):
    x = np.zeros(2)
    session.bind_input("x", types.SimpleNamespace(__array_interface__=x.__array_interface__))
    x[:] = 3, 4
    seen = []
    session.run(lambda ctx: seen.extend(ctx.inputs["x"].numpy().tolist()))
    assert seen == [3, 4]


def test_output_devices_are_in_binding_order(session):
    session.bind_output("b", "host/managed")
    session.bind_output("a", np.zeros(4, "f4"))
    assert session.device_for_outputs() == [gpumem.Device("host")] * 2


# ---- streams -------------------------------------------------------------------------------------


def test_user_stream_is_used_and_never_destroyed(host, stream):
    for given in (stream, stream.ptr, str(stream.ptr), hex(stream.ptr)):
        with gpumem.Session("host", {"user_compute_stream": given}) as session:
            assert session.compute_stream == session.copy_stream == stream
            session.bind_output("y")
            session.run(lambda ctx: ctx.output("y", 1, "u1"))
        stream.synchronize()


def test_stream_zero_is_the_legacy_default_stream(host):
    options = {"user_compute_stream": "0", "has_user_compute_stream": "1"}
    with gpumem.Session("host", options) as session:
        assert session.compute_stream.ptr == 0
        session.run(lambda ctx: None)


def test_stream_of_another_device_is_refused():
    child.run_quietly("""
        import gpumem
        gpumem.device.set_host_device_count(2)
        stream = gpumem.Stream("host:1")
        try:
            gpumem.Session("host:0", {"user_compute_stream": stream})
        except gpumem.ConfigError as error:
            assert "host:0" in str(error)
        else:
            raise AssertionError
    """)


UNIFIED = [
    {"use_ep_level_unified_stream": True},
    {"user_compute_stream": 0, "has_user_compute_stream": True},
    {"external_allocator": (lambda nbytes: 0, lambda ptr: None)},
]


@pytest.mark.parametrize("options", UNIFIED)
def test_overlapping_runs_under_a_unified_stream_are_refused(options):
    with gpumem.Session("host", options) as session:
        inside, go_on = threading.Event(), threading.Event()

        def slow(ctx):
            inside.set()
            assert go_on.wait(60)

        with running(session.run, slow):
            assert inside.wait(60)
            with pytest.raises(gpumem.errors.ConcurrentRunError, match="unified"):
                session.run(lambda ctx: None)
            with pytest.raises(gpumem.errors.ConcurrentRunError):
                session.close()
            go_on.set()
        session.run(lambda ctx: None)
        with pytest.raises(gpumem.errors.ConcurrentRunError):
            session.run(lambda ctx: session.run(lambda ctx: None))


def test_run_of_what_is_not_callable_is_refused_before_anything_is_queued(session, host):
    host.reset_counts()
    with pytest.raises(TypeError, match="fn = None"):
        session.run(None)
    assert sum(map(host.call_count, COPIES)) == 0
    assert session.outputs() == {}


def test_runs_on_separate_streams_may_overlap(session):
    streams = []

    def outer(ctx):
        streams.append(ctx.stream)
        session.run(lambda ctx: streams.append(ctx.stream))

    session.run(outer)
    assert len(set(streams)) == 2


def test_run_that_overlaps_no_other_is_on_the_compute_stream_again(session):
    streams = []

    def outer(ctx):
        session.run(lambda ctx: streams.append(ctx.stream))

    session.run(outer)
    for _ in range(3):
        session.run(lambda ctx: streams.append(ctx.stream))
    assert streams[0] != session.compute_stream
    assert streams[1:] == [session.compute_stream] * 3


def test_compute_stream_comes_after_an_overlapping_run_that_was_not_waited_for(session, driver):

    def inner(ctx):
        gates.append(driver.block(ctx.stream))
        streams.append(ctx.stream)

    streams, gates = [], []
    session.run(lambda ctx: session.run(inner, synchronize=False), synchronize=False)
    with gates[0]:
        assert streams[0] != session.compute_stream
        assert_unfinished(session.compute_stream)
    session.compute_stream.synchronize()
    assert streams[0].query()


def test_run_on_a_capturing_stream_does_not_wait_and_keeps_addresses(host, driver, stream):
    options = {"user_compute_stream": stream, "enable_cuda_graph": True}
    with gpumem.Session("host", options) as session:
        session.bind_output("y", "host/host_accessible")

        def work(ctx):
            driver.fill(ctx.output("y", 4096, "u1").buffer, 7, ctx.stream)

        session.run(work)
        first = session.outputs()["y"]
        session.run(work)
        assert session.outputs()["y"].ptr == first.ptr
        with Graph(driver, stream) as graph:
            assert stream.capturing
            first.numpy(sync=False)[:] = 0
            session.run(work)
        assert graph.handle
        assert not stream.capturing
        stream.synchronize()
        assert (first.numpy() == 0).all()
        graph.destroy()


# ---- allocators ----------------------------------------------------------------------------------


def test_default_resources_serve_without_an_environment(session):
    assert session.allocator() is gpumem.get_default_resource("host")
    assert session.allocator("host/managed") is gpumem.get_default_resource("host/managed")


def test_environment_allocators_serve_and_are_referenced():
    with gpumem.Environment() as environment:
        arena = environment.register("host")
        with gpumem.Session("host", environment=environment) as session:
            assert session.allocator() is session.allocator("host:0") is arena
            assert environment.references("host") == 2
            other = environment.register("host")
            assert not arena.closed
            assert session.allocator() is arena
            with pytest.raises(gpumem.errors.NoAllocatorError):
                session.allocator("host/managed")
            with pytest.raises(gpumem.errors.NoAllocatorError):
                session.bind_output("y", "host/managed")
        assert arena.closed
        assert environment.shared_allocator("host") is other


def test_device_without_an_allocator_is_refused():
    with gpumem.Environment() as environment, pytest.raises(gpumem.errors.NoAllocatorError):
        gpumem.Session("host", environment=environment)


def test_options_that_differ_from_the_shared_arena_are_refused():
    with gpumem.Environment() as environment:
        environment.register("host", {"max_mem": 1 << 30})
        for options in (
            {"arena.max_mem": "5"},
            {"ep.host.arena.max_mem": "5"},
            {"arena": {"max_mem": 5}},
            {"arena": gpumem.ArenaConfig()},
        ):
            with pytest.raises(gpumem.ConfigError, match=r"arena.max_mem = .*private_arena"):
                gpumem.Session("host", options, environment)
            assert environment.references("host") == 1
        with gpumem.Session("host", {"arena.max_mem": str(1 << 30)}, environment) as session:
            assert session.allocator() is environment.shared_allocator("host")


def test_private_arena_belongs_to_the_session():
    keys = {"ep_factory.host.arena.max_mem": "5", "ep.host.arena.max_mem": str(1 << 30)}
    with gpumem.Environment(keys) as environment:
        shared = environment.register("host")
        options = {"private_arena": True, "arena.extend_strategy": "1"}
        with gpumem.Session("host", options, environment) as session:
            own = session.allocator()
            assert own is not shared
            assert own.config.max_mem == 1 << 30
            assert own.config.extend_strategy == "same_as_requested"
            assert environment.references("host") == 1
        assert own.closed


def test_other_prefix_gives_a_warning_and_unknown_names_are_refused():
    with gpumem.Environment() as environment:
        environment.register("host")
        with pytest.warns(gpumem.errors.ConfigWarning, match="ep_factory.host"):
            gpumem.Session("host", {"ep_factory.host.arena.max_mem": "5"}, environment).close()
        for name in ("gpu", "CUDAExecutionProvider"):
            for key in ("arena.max_mem", "enable_cuda_graph"):
                with pytest.raises(gpumem.ConfigError, match="expected host, host:0"):
                    gpumem.Session("host", {f"ep.{name}.{key}": "1"}, environment)
        with pytest.raises(gpumem.ConfigError, match="expected host, host:0"):
            gpumem.Session("host", {"ep.host/managed.enable_cuda_graph": "1"}, environment)
        assert environment.references("host") == 1


def test_one_mapping_serves_the_sessions_of_several_devices():
    keys = {
        "ep.host.enable_cuda_graph": "1",
        "ep.cuda.enable_cuda_graph": "0",
        "ep.cuda:1.user_compute_stream": "0x10",
        "ep.HOST.arena.max_mem": "1048576",
        "ep.cuda.arena.max_mem": "2097152",
        "ep_factory.cuda.arena.max_mem": "2097152",
    }
    with gpumem.Session("host", keys) as session:
        assert session.options.enable_cuda_graph
        assert not session.options.has_user_compute_stream
        assert session.allocator().config.max_mem == 1048576
    elsewhere = {key: value for key, value in keys.items() if "cuda" in key}
    with gpumem.Session("host", elsewhere) as session:
        assert not session.options.unified_stream
        assert session.allocator() is gpumem.get_default_resource("host")
    with gpumem.Environment() as environment:
        shared = environment.register("host")
        with gpumem.Session("host", elsewhere, environment) as session:
            assert session.allocator() is shared
    for key, value in {
        "ep.cuda.enable_cuda_graph": "maybe",
        "ep.cuda.enable_cuda_graphs": "1",
        "ep.cuda.arena.max_mem": "1x",
        "ep_factory.cuda.enable_cuda_graph": "1",
    }.items():
        with pytest.raises(gpumem.ConfigError, match=key):
            gpumem.Session("host", {key: value})


class Callbacks:
    """An external allocator's functions over an arena; notes the calls."""

    def __init__(self):
        self.arena = gpumem.Arena("host")
        self.blocks = {}
        self.calls = []

    def alloc(self, nbytes):
        buffer = self.arena.allocate(nbytes)
        self.blocks[buffer.ptr] = buffer
        self.calls.append("alloc")
        return buffer.ptr

    def free(self, ptr):
        del self.blocks[ptr]
        self.calls.append("free")

    def empty_cache(self):
        self.calls.append("empty_cache")


def test_external_allocator_serves_its_session_alone():
    mine, yours = Callbacks(), Callbacks()
    given = (mine.alloc, mine.free, mine.empty_cache)
    with (
        gpumem.Session("host", {"external_allocator": given}) as session,
        gpumem.Session("host", {"external_allocator": (yours.alloc, yours.free)}) as other,
    ):
        for each in (session, other):
            each.bind_output("y")
            each.run(lambda ctx: ctx.output("y", 1000, "u1"))
        assert (mine.calls, yours.calls) == (["alloc"], ["alloc"])
        session.bind_output("y")
        weights = session.allocator().allocate_persistent(1000)
        weights.close()
        assert mine.calls == ["alloc", "alloc", "free", "empty_cache"]
        assert session.allocator("host/managed") is gpumem.get_default_resource("host/managed")
    gc.collect()
    assert mine.calls.count("free") == mine.calls.count("alloc")
    assert yours.calls == ["alloc", "free"]


def test_external_allocator_object_belongs_to_one_session_at_a_time():
    calls = Callbacks()
    allocator = gpumem.ExternalAllocator(calls.alloc, calls.free, memory="host")
    with gpumem.Session("host", {"external_allocator": allocator}) as session:
        assert session.allocator() is allocator
        with pytest.raises(gpumem.ConfigError, match="another session"):
            gpumem.Session("host", {"external_allocator": allocator})
    gpumem.Session("host", {"external_allocator": allocator}).close()
    assert not allocator.closed
    pinned = gpumem.ExternalAllocator(calls.alloc, calls.free, memory="host/managed")
    with pytest.raises(gpumem.ConfigError, match="host:0"):
        gpumem.Session("host", {"external_allocator": pinned})


def test_devices_are_isolated():
    child.run_quietly("""
        import gpumem
        gpumem.device.set_host_device_count(2)
        with gpumem.Environment() as environment:
            arenas = [environment.register(f"host:{i}") for i in range(2)]
            for i in range(2):
                with gpumem.Session(f"host:{i}", environment=environment) as session:
                    assert session.compute_stream.device == gpumem.Device(f"host:{i}")
                    session.bind_output("y")
                    session.run(lambda ctx: ctx.output("y", 1000, "u1"))
                    assert session.outputs()["y"].memory.device == gpumem.Device(f"host:{i}")
                    assert session.device_for_outputs() == [gpumem.Device(f"host:{i}")]
            assert [arena.stats().num_allocs for arena in arenas] == [1, 1]
    """)


# ---- many at once --------------------------------------------------------------------------------


def test_concurrent_sessions():
    wrong = []
    with gpumem.Environment() as environment:
        arena = environment.register("host")
        environment.register("host/host_accessible")

        def work(number):
            with gpumem.Session("host", environment=environment) as session:
                for i in range(20):
                    session.bind_input("x", np.full(100, number + i, "f4"))
                    session.bind_output("y", "host/host_accessible" if i % 2 else None)
                    session.run(double)
                    if (session.outputs()["y"].numpy() != 2 * (number + i)).any():
                        wrong.append((number, i))

        in_threads(work, range(0, 600, 100))
        assert not wrong
        assert environment.references("host") == 1
        assert arena.stats().requested_in_use == 0


def test_closed_session_refuses_every_call(session):
    session.bind_output("y")
    session.close()
    session.close()
    assert session.closed
    for use in (
        lambda: session.run(double),
        lambda: session.bind_input("x", np.zeros(4)),
        lambda: session.bind_output("y"),
        session.allocator,
    ):
        with pytest.raises(gpumem.errors.ClosedError):
            use()


def test_close_does_not_wait_for_what_this_thread_has_yet_to_signal():
    stream, value = gpumem.Stream("host"), HostTimeline.create()
    options = {"private_arena": True, "user_compute_stream": stream}
    session = gpumem.Session("host", options)
    ended = weakref.ref(session.allocator())
    session.bind_output("y")

    def work(ctx):
        value.enqueue_wait(ctx.stream, 1)
        ctx.output("y", 4096, "u1")

    session.run(work, synchronize=False)
    session.close()
    assert ended() is None  # what it held goes back once the stream has passed
    value.signal(1)
    stream.synchronize()


@pytest.mark.parametrize("environment", [3, {}, "host"])
def test_invalid_environment_is_refused(environment):
    with pytest.raises(TypeError, match="Environment"):
        gpumem.Session("host", environment=environment)

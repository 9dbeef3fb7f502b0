"""Sessions with graph capture: a first run, one that is captured, and launches from then on."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.resources import Over
from helpers.waiting import wait_until

import gpumem

N = 4096


class Work:
    """Copies input to output by the stream; counts how often it was called, and while capturing."""

    def __init__(self):
        self.calls = []

    def __call__(self, ctx):
        self.calls.append(ctx.stream.capturing)
        gpumem.copy(ctx.output("y", N, "u1"), ctx.inputs["x"], ctx.stream)


@pytest.fixture
def x():
    return gpumem.zeros(N, "u1", memory="host/managed")


def session_of(x, **options):
    session = gpumem.Session("host", {"enable_cuda_graph": True} | options)
    session.bind_input("x", x)
    session.bind_output("y")
    return session


def test_second_run_is_captured_and_later_ones_launched(x, host):
    work = Work()
    with session_of(x) as session:
        addresses = set()
        for value in range(1, 7):
            x.numpy()[:] = value
            host.reset_counts()
            session.run(work)
            y = session.outputs()["y"]
            assert (y.numpy() == value).all(), value
            addresses.add(y.ptr)
            assert host.call_count("cuGraphLaunch") == (value > 1)
        assert work.calls == [False, True]
        assert len(addresses) == 1


def test_copy_of_an_input_waits_for_the_launch_that_reads_the_one_before(monkeypatch, x):
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    seen = gpumem.zeros(N, "u1", memory="host/managed")
    options = {"enable_cuda_graph": True, "do_copy_in_default_stream": "0"}
    with gpumem.Session("host", options) as session:
        session.bind_input("x", x)

        def work(ctx):
            gpumem.copy(seen, ctx.inputs["x"], ctx.stream)

        for _ in range(3):
            session.run(work)
        beside = gpumem.Stream("host")
        with HostDriver().block(session.compute_stream):  # as a launch that is still to read it
            session.run(work, synchronize=False)
            gpumem.full(1 << 20, 1, "u1", memory="host", stream=beside).numpy()
            assert not session.copy_stream.query()


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_launches_do_not_write_an_output_that_was_closed(x, arena, runs):
    work = Work()
    with gpumem.using_resource(arena), session_of(x) as session:
        for _ in range(runs):
            session.run(work)
        closed = session.outputs()["y"].buffer
        address = closed.ptr
        closed.close()
        with arena.allocate(N) as taken:
            assert taken.ptr == address
            memoryview(taken)[:] = bytes([9]) * N
            x.numpy()[:] = 5
            for _ in range(3):
                session.run(work)
                assert (session.outputs()["y"].numpy() == 5).all()
            assert bytes(memoryview(taken)) == bytes([9]) * N


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_input_is_freed_once_its_binding_is_replaced(x, arena, runs):
    work = Work()
    with session_of(gpumem.empty(N, "u1", resource=arena)) as session:
        for _ in range(runs):
            session.run(work)
        session.bind_input("x", x)
        assert arena.stats().in_use == 0


def test_new_function_or_binding_starts_a_new_capture(x):
    work, other = Work(), Work()
    with session_of(x) as session:
        for _ in range(3):
            session.run(work)
        for _ in range(3):
            session.run(other)
        assert (work.calls, other.calls) == ([False, True], [False, True])
        session.bind_input("x", gpumem.full(N, 9, "u1", memory="host/managed"))
        session.run(other)
        assert (session.outputs()["y"].numpy() == 9).all()
        assert other.calls == [False, True, False]


@pytest.mark.parametrize("copies", ["1", "0"])
def test_inputs_and_outputs_are_copied_around_each_launch(x, host, monkeypatch, copies):
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    host.set_lag(1_000_000)
    work, array = Work(), gpumem.zeros(N, "u1", memory="host/managed")
    with session_of(x, do_copy_in_default_stream=copies) as session:
        session.bind_output("y", array)
        for value in range(1, 6):
            x.numpy()[:] = value
            session.run(work)
            assert (array.numpy(sync=False) == value).all(), value
    assert work.calls == [False, True]


@pytest.mark.parametrize("runs", [1, 2, 3])
@pytest.mark.parametrize("closed", ["input", "output"])
def test_copied_input_or_output_that_was_closed_starts_a_new_capture(x, monkeypatch, closed, runs):
    monkeypatch.setattr("gpumem.device.can_access", lambda reader, memory: False)
    copied = []

    def work(ctx):
        copied.append(ctx.inputs["x"])
        gpumem.copy(ctx.output("y", N, "u1"), ctx.inputs["x"], ctx.stream)

    with session_of(x) as session:
        session.bind_output("y", "host/managed")
        for _ in range(runs):
            session.run(work)
        before = copied[-1] if closed == "input" else session.outputs()["y"]
        before.buffer.close()
        taken = [gpumem.full(N, 77, "u1", memory="host") for _ in range(8)]
        for value in range(1, 5):
            x.numpy()[:] = value
            session.run(work)
            assert (session.outputs()["y"].numpy() == value).all()
        assert all((each.numpy() == 77).all() for each in taken)
        assert len(copied) == min(runs, 2) + 2


def test_captured_scratch_stays_reserved_while_the_graph_may_run(x, driver):
    arena = gpumem.Arena("host")

    for resource in (arena, gpumem.adaptors.limit(arena, 1 << 20), Over(arena)):
        with gpumem.using_resource(resource), session_of(x) as session:

            def work(ctx):
                with ctx.allocator.allocate(N, ctx.stream) as scratch:
                    driver.fill(scratch, 5, ctx.stream)
                    driver.call(
                        "cuMemcpyDtoDAsync",
                        ctx.output("y", N, "u1").ptr,
                        scratch.ptr,
                        N,
                        ctx.stream.ptr,
                    )

            for _ in range(4):
                session.run(work)
                mine = [gpumem.full(N, 77, "u1", memory="host") for _ in range(8)]
                session.run(work)
                assert all((each.numpy() == 77).all() for each in mine)
                assert (session.outputs()["y"].numpy() == 5).all()
        del session, mine, work
        gc.collect()
    assert arena.stats().requested_in_use == 0


@pytest.mark.parametrize("pool", [True, False], ids=["graph pool", "leases"])
def test_allocator_of_a_captured_run_shows_the_resource(x, arena, pool):
    beside = gpumem.Arena("host/managed")
    resource = arena if pool else gpumem.adaptors.fallback(arena, beside)
    seen = []

    def work(ctx):
        allocator = ctx.allocator
        seen.append((allocator.stats(), allocator.is_arena, allocator.closed, allocator.budget))
        assert allocator == resource
        assert hash(allocator) == hash(resource)
        assert type(allocator.shrink()) is gpumem.ShrinkReport
        if not pool:
            assert allocator.served == resource.served
        allocator.reset_stream(gpumem.Stream("host"))
        gpumem.copy(ctx.output("y", N, "u1"), ctx.inputs["x"], ctx.stream)

    with gpumem.using_resource(resource), session_of(x) as session:
        kept = resource.allocate(N)
        for _ in range(2):
            session.run(work)
        del kept
    assert [stats.requested_in_use >= N for stats, *_ in seen] == [True, True]
    assert [rest for _, *rest in seen] == [[True, False, None]] * 2


@pytest.mark.parametrize("sleeper", ["output", "kept output", "scratch"])
def test_launch_over_sleeping_memory_is_refused_and_goes_on_after_a_wake(x, host, sleeper, driver):
    arena, awake = gpumem.Arena("host"), gpumem.Arena("host")
    own = arena if sleeper == "scratch" else awake
    calls = []

    def work(ctx):
        calls.append(1)
        with ctx.allocator.allocate(N, ctx.stream) as scratch:
            driver.fill(scratch, 4, ctx.stream)
        driver.fill(ctx.output("y", N, "u1").buffer, 5, ctx.stream)

    with gpumem.using_resource(own), session_of(x) as session:
        places = {"output": gpumem.zeros(N, "u1", resource=arena), "kept output": arena}
        session.bind_output("y", places.get(sleeper, awake))
        for _ in range(3):
            session.run(work)
        places.clear()
        gc.collect()
        arena.sleep()
        host.reset_counts()
        for _ in range(2):
            with pytest.raises(gpumem.errors.AsleepError, match="wake"):
                session.run(work)
        assert host.call_count("cuGraphLaunch") == 0
        gpumem.Stream("host").synchronize()
        arena.wake()
        session.run(work)
        assert host.call_count("cuGraphLaunch") == 1
        assert len(calls) == 2
        assert (session.outputs()["y"].numpy() == 5).all()


def test_launch_needs_the_tags_that_its_capture_allocated_under(x):
    driver, arena = HostDriver(), gpumem.Arena("host")
    output = gpumem.zeros(N, "u1", memory="host")

    def work(ctx):
        with arena.tag("scratch"), ctx.allocator.allocate(N, ctx.stream) as scratch:
            driver.fill(scratch, 4, ctx.stream)
        driver.fill(ctx.output("y", N, "u1").buffer, 5, ctx.stream)

    with gpumem.using_resource(arena), session_of(x) as session:
        session.bind_output("y", output)
        for _ in range(3):
            session.run(work)
        gc.collect()
        arena.sleep("scratch")
        with pytest.raises(gpumem.errors.AsleepError, match="graph pool"):
            session.run(work)
        arena.wake()
        session.run(work)


def test_function_that_queues_nothing_is_called_every_time(x):
    calls = []

    def work(ctx):
        calls.append(ctx.stream.capturing)
        np.copyto(ctx.output("y", N, "u1").numpy(sync=False), ctx.inputs["x"].numpy(sync=False))

    with session_of(x) as session:
        for value in range(1, 5):
            x.numpy()[:] = value
            session.run(work)
            assert (session.outputs()["y"].numpy() == value).all()
    assert calls == [False, True, False, False]


def test_failed_capture_is_an_error_and_the_next_run_starts_over(x):
    calls = []

    def waits(ctx):
        calls.append(ctx.stream.capturing)
        gpumem.copy(ctx.output("y", N, "u1"), ctx.inputs["x"], ctx.stream)
        ctx.stream.synchronize()

    with session_of(x) as session:
        session.run(waits)
        before = session.outputs()["y"]
        with pytest.raises(gpumem.errors.DriverError, match="CAPTURE"):
            session.run(waits)
        assert session.outputs()["y"] is before
        assert not session.compute_stream.capturing
        session.run(waits)
        assert calls == [False, True, False]


def test_functions_exception_ends_the_capture(x):
    turns = iter([None, KeyError("mine"), None])

    def work(ctx):
        error = next(turns)
        gpumem.copy(ctx.output("y", N, "u1"), ctx.inputs["x"], ctx.stream)
        if error is not None:
            raise error

    with session_of(x) as session:
        session.run(work)
        with pytest.raises(KeyError, match="mine"):
            session.run(work)
        assert not session.compute_stream.capturing
        session.run(work)


@pytest.mark.parametrize(
    "call",
    [
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuGraphGetNodes",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
    ],
)
def test_session_graph_survives_a_failure_of_any_driver_call(x, host, call):
    work = Work()
    with session_of(x) as session:
        session.run(work)
        host.fail(call, 1, 999)
        try:
            with pytest.raises(gpumem.errors.DriverError, match=call):
                session.run(work)
        finally:
            host.clear_faults()
        assert not session.compute_stream.capturing
        for value in (3, 4, 5):
            x.numpy()[:] = value
            session.run(work)
            assert (session.outputs()["y"].numpy() == value).all()


def test_session_close_releases_graphs_and_memory(x, host):
    gc.collect()
    live = host.live()
    arena = gpumem.Arena("host")
    with gpumem.using_resource(arena):
        session = session_of(x)
        work = Work()
        for _ in range(3):
            session.run(work)
        assert host.live()["graphs"] > live["graphs"]
        session.close()
        del session
    gc.collect()
    assert host.live()["graphs"] == live["graphs"]
    arena.close()


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_unfinished_launch_retains_its_inputs_and_outputs(make_arena, host, runs):
    arena, side = make_arena(), gpumem.Stream("host")
    x, y = (gpumem.zeros(N, "u1", resource=arena, stream=side) for _ in range(2))
    used = {x.ptr, y.ptr}
    session, work = gpumem.Session("host", {"enable_cuda_graph": True}), Work()
    session.bind_input("x", x)
    session.bind_output("y", y)
    for _ in range(runs - 1):
        session.run(work)
    with HostDriver().block(session.compute_stream):
        session.run(work, synchronize=False)
        session.close()
        del x, y, session
        gc.collect()
        taken = [arena.allocate(N, side) for _ in range(4)]
        assert not used & {block.ptr for block in taken}
    gpumem.Device("host").synchronize()
    taken.append(arena.allocate(arena.stats().reserved - 5 * N, side))  # all that is left


@pytest.mark.parametrize("named", ["persistent", "another stream", "the run's stream"])
def test_unfinished_launch_retains_scratch_of_any_stream(make_arena, host, named):
    arena, other, addresses = make_arena(), gpumem.Stream("host"), []
    session = gpumem.Session("host", {"enable_cuda_graph": True, "external_allocator": Over(arena)})
    session.bind_output("y")

    def work(ctx):
        if named == "persistent":
            scratch = ctx.allocator.allocate_persistent(N)
        else:
            scratch = ctx.allocator.allocate(N, other if named == "another stream" else None)
        addresses.append(scratch.ptr)
        HostDriver().fill(scratch, 5, ctx.stream)
        HostDriver().fill(ctx.output("y", N, "u1").buffer, 5, ctx.stream)
        scratch.close()

    for _ in range(2):
        session.run(work)
    run_stream = session.compute_stream
    with HostDriver().block(run_stream):
        session.run(work, synchronize=False)
        session.close()
        del session
        gc.collect()
        for stream in (None, other, gpumem.Stream("host")):
            with arena.allocate(N, stream) as block:
                if block.ptr == addresses[-1]:
                    assert not block.stream.query(), "its stream does not wait for the launch"
    gpumem.Device("host").synchronize()
    wait_until(lambda: arena.stats().in_use == 0)


def test_captured_runs_do_not_overlap(x):
    with session_of(x) as session:

        def outer(ctx):
            ctx.output("y", N, "u1")
            session.run(lambda ctx: None)

        with pytest.raises(gpumem.errors.ConcurrentRunError, match="enable_cuda_graph"):
            session.run(outer)


def test_graph_capture_over_a_driver_pool_is_refused():
    for pool in (
        gpumem.DriverPool("host"),
        gpumem.adaptors.limit(gpumem.DriverPool("host"), 1 << 20),
    ):
        with (
            gpumem.using_resource(pool),
            pytest.raises(gpumem.ConfigError, match=r"enable_cuda_graph.*arena"),
        ):
            gpumem.Session("host", {"enable_cuda_graph": True})


@pytest.mark.parametrize("call", ["cuGraphExecDestroy", "cuGraphDestroy"])
def test_graph_that_the_driver_refuses_to_destroy_is_tried_once_more(x, host, call):
    gc.collect()
    before = host.live()
    work = Work()
    with session_of(x) as session:
        for _ in range(2):
            session.run(work)
        host.fail(call, 1, 999)
    host.clear_faults()
    del session
    gc.collect()
    assert host.live()["graphs"] == before["graphs"]


def test_refused_question_whether_a_stream_captures_is_the_error_of_the_run(x, host):
    work = Work()
    y = gpumem.zeros(N, "u1", memory="host/managed")
    with session_of(x) as session:
        session.bind_output("y", y)
        session.run(work)
        codes = []
        for call in itertools.count(1):
            host.fail("cuStreamIsCapturing", call, 999)
            try:
                session.run(work)
            except gpumem.errors.DriverError as error:
                codes.append(error.code)
            else:
                break
            finally:
                host.clear_faults()
            session.run(work)
        assert codes == [999] * (call - 1)
        assert len(codes) > 1

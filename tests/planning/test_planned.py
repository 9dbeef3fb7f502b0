"""Following a plan: places as planned, and nobody's bytes under another's, whatever is done."""

import gc
import itertools
import threading

import numpy as np
import pytest
from helpers.child import run_quietly
from helpers.driver import HostDriver
from helpers.one_block import BLOCK, next_address, one_block
from helpers.resources import Plain
from stress.patterns import Patterns

import gpumem
from gpumem.errors import ClosedError, ConcurrentRunError, ConfigError, InUseError, OutOfMemoryError
from gpumem.planning import (
    IterationPlan,
    IterationRecording,
    IterationReport,
    PlannedResource,
    plan,
)

KIB = 1 << 10
LAG = 1_000_000  # ns


def planned_as(*rows):
    """Make a plan of (size, offset, first, last[, stream])."""
    sizes, offsets, first, last, streams = zip(*((*row, 0)[:5] for row in rows), strict=True)
    return IterationPlan(sizes, streams, offsets, first, last)


# Two blocks side by side, then one over both.
THREE = planned_as((1000, 0, 0, 1), (500, 1024, 1, 2), (1500, 0, 3, 4))


@pytest.fixture
def follow(make_arena):
    """Make resources that follow a plan; each is checked, and leaves its upstream empty."""
    made = []

    def make(plan, upstream=None, **options):
        made.append(PlannedResource(plan, upstream or make_arena(), **options))
        return made[-1]

    yield make
    for resource in made:
        resource.check_invariants()
        resource.close()
        assert resource.upstream.stats().in_use == 0


def places(resource, *buffers):
    return [buffer.ptr - resource.ptr for buffer in buffers]


# ---- as planned ----------------------------------------------------------------------------------


def test_nth_allocation_takes_the_nth_planned_offset(follow):
    planned = follow(THREE)
    for _ in range(3):
        with planned.iteration() as resource:
            assert resource is planned
            a, b = planned.allocate(1000), planned.allocate(500)
            assert places(planned, a, b) == [0, 1024]
            assert (a.nbytes, a.allocated_nbytes, b.allocated_nbytes) == (1000, 1024, 512)
            a.close()
            b.close()
            c = planned.allocate(1500)
            assert places(planned, c) == [0]
            c.close()
        assert planned.report == IterationReport(3, 0, 0, None)


def test_one_block_lies_over_hundreds_that_were_freed(follow):
    count = 300
    small = [(256, 256 * i, i, count) for i in range(count)]
    over_all = (256 * count, 0, count + 1, count + 2)
    top = (256, 256 * (count - 1), count + 3, count + 4)
    planned = follow(planned_as(*small, over_all, top))
    for _ in range(3):
        with planned.iteration():
            blocks = [planned.allocate(256) for _ in range(count)]
            assert places(planned, *blocks) == [256 * i for i in range(count)]
            for block in blocks:
                block.close()
            with planned.allocate(256 * count) as over:
                assert places(planned, over) == [0]
            with planned.allocate(256) as last:
                assert places(planned, last) == [256 * (count - 1)]
        assert planned.report == IterationReport(count + 2, 0, 0, None)


def test_block_comes_from_the_upstream_and_has_the_peak_size(follow, make_arena):
    arena = make_arena()
    planned = follow(THREE, arena)
    assert arena.stats().requested_in_use == THREE.peak_bytes
    assert planned.stats() == arena.stats()
    with planned.iteration():
        planned.allocate(1000).close()
        assert arena.stats().requested_in_use == THREE.peak_bytes, "places are in the block"
    planned.close()
    assert arena.stats().in_use == 0


def test_recorded_iteration_is_replayed_from_the_plan(follow, make_arena, rng):
    streams = [gpumem.Stream("host"), gpumem.Stream("host")]
    script = [(rng.randrange(1, 40 * KIB), rng.randrange(2), rng.random()) for _ in range(200)]

    def step(resource):
        held = []
        for nbytes, stream, drop in script:
            held.append(resource.allocate(nbytes, streams[stream]))
            while held and drop < 0.5:
                held.pop(int(drop * len(held)))
                drop += 0.2

    arena = make_arena()
    recording = IterationRecording(arena)
    step(recording.resource)
    planned = follow(plan(recording.trace()), arena)
    for _ in range(4):
        for stream in streams:
            stream.synchronize()
        with planned.iteration():
            step(planned)
        assert planned.report == IterationReport(200, 0, 0, None)


def test_one_stream_in_steady_state_makes_no_driver_call(follow, host):
    planned, stream = follow(THREE), gpumem.Stream("host")
    for turn in range(3):
        with planned.iteration():
            buffers = [planned.allocate(1000, stream), planned.allocate(500, stream)]
            buffers.clear()
            planned.allocate(1500, stream).close()
        if turn == 0:
            calls = host.call_count()
    assert host.call_count() == calls


def test_upstream_serves_outside_of_an_iteration(follow):
    planned = follow(THREE)
    with planned.allocate(1000) as buffer:
        assert not 0 <= buffer.ptr - planned.ptr < THREE.peak_bytes
    assert planned.report == IterationReport(0, 0, 0, None)
    with planned.iteration():
        planned.allocate_persistent(1000).close()
        assert planned.allocate(0).ptr == 0
        assert planned.report == IterationReport(0, 0, 0, None), "neither is counted"


# ---- differing from the plan ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "report"),
    [
        ((1000, 501, 1500), (1, 0, 2, "allocation 1 is of 501 B, in the plan of 500 B")),
        ((7,), (0, 0, 1, "allocation 0 is of 7 B, in the plan of 1000 B")),
        ((1000, 500, 1500, 9), (3, 0, 1, "9 B asked for after all 3 allocations")),
        ((1000, 500), (2, 0, 0, "it ended after 2 of 3 allocations")),
        ((), (0, 0, 0, "it ended after 0 of 3 allocations")),
    ],
)
def test_upstream_serves_after_the_first_difference_and_the_reason_is_reported(
    follow, sizes, report
):
    planned = follow(THREE)
    with planned.iteration():
        for number, nbytes in enumerate(sizes):
            with planned.allocate(nbytes) as buffer:
                inside = 0 <= buffer.ptr - planned.ptr < THREE.peak_bytes
                assert inside == (number < report[0])
    told = planned.report
    assert (told.planned, told.displaced, told.online) == report[:3]
    assert told.mismatch.startswith(report[3])
    with planned.iteration():
        for nbytes in (1000, 500, 1500):
            planned.allocate(nbytes).close()
    assert planned.report == IterationReport(3, 0, 0, None), "the next iteration begins anew"


def test_each_planned_stream_maps_to_one_program_stream(follow):
    two = planned_as((256, 0, 0, 9, 0), (256, 256, 1, 9, 1), (256, 512, 2, 9, 0))
    a, b, c = (gpumem.Stream("host") for _ in range(3))
    planned = follow(two)
    for streams, planned_count in (((a, b, a), 3), ((b, a, b), 3), ((a, a, a), 1), ((a, b, c), 2)):
        with planned.iteration():
            for stream in streams:
                planned.allocate(256, stream).close()
        assert planned.report.planned == planned_count
        if planned_count < 3:
            assert "for another stream than the plan's" in planned.report.mismatch


def test_request_larger_than_planned_goes_to_the_upstream(follow):
    plan_of_two = planned_as((256, 0, 0, 9), (256, 256, 1, 9))
    planned = follow(plan_of_two)
    with planned.iteration():
        a, b = planned.allocate(256, alignment=256), planned.allocate(256, alignment=1 << 20)
        assert places(planned, a) == [0]
        assert b.ptr % (1 << 20) == 0
        a.close()
        b.close()
    assert planned.report == IterationReport(1, 1, 0, None)
    with planned.iteration():
        planned.allocate(256, shareable=True).close()
        planned.allocate(256).close()
    assert planned.report == IterationReport(1, 1, 0, None)


# ---- what lives on -------------------------------------------------------------------------------


def test_block_that_outlives_its_plan_keeps_its_bytes(follow):
    planned = follow(THREE)
    with planned.iteration():
        a, b = planned.allocate(1000), planned.allocate(500)
        b.close()
        c = planned.allocate(1500)
        assert planned.report == IterationReport(2, 1, 0, None)
    with planned.iteration():
        again = planned.allocate(1000)
        assert planned.report == IterationReport(0, 1, 0, None), "a lives there still"
        assert places(planned, planned.allocate(500)) == [1024]
    view = np.asarray(memoryview(a))
    a.close()
    with planned.iteration():
        assert planned.allocate(1000).ptr != planned.ptr, "a view of it lives"
    del view
    with planned.iteration():
        assert planned.allocate(1000).ptr == planned.ptr
    again.close()
    c.close()


def test_close_with_live_blocks_is_refused_and_blocks_outlive_the_resource(make_arena):
    arena = make_arena()
    planned = PlannedResource(THREE, arena)
    with planned.iteration():
        buffer = planned.allocate(1000)
    with pytest.raises(InUseError):
        planned.close()
    memoryview(buffer)[:] = b"x" * 1000
    del planned
    gc.collect()
    assert bytes(memoryview(buffer)) == b"x" * 1000
    assert arena.stats().requested_in_use == THREE.peak_bytes
    buffer.close()
    del buffer
    gc.collect()
    arena.shrink()
    assert arena.stats().in_use == 0


def test_planned_blocks_are_recorded_as_others_are(follow):
    planned = follow(THREE)
    with gpumem.observe.record() as recording, planned.iteration():
        a, b = planned.allocate(1000), planned.allocate(500)
        a.close()
        b.close()
        planned.allocate(1500).close()
    assert planned.report == IterationReport(3, 0, 0, None)
    events = [
        (event.action, event.address - planned.ptr, event.nbytes) for event in recording.events()
    ]
    assert events == [
        ("alloc", 0, 1000),
        ("alloc", 1024, 500),
        ("free", 0, 1000),
        ("free", 1024, 500),
        ("alloc", 0, 1500),
        ("free", 0, 1500),
    ]


def test_planned_block_behind_a_wait_on_the_device_is_recorded(follow):
    driver = HostDriver()
    slow, taker = gpumem.Stream("host"), gpumem.Stream("host")
    planned = follow(HANDED_ON, stream_reuse="wait")
    with gpumem.observe.record() as recording, driver.block(slow), planned.iteration():
        for stream in (slow, taker):
            planned.allocate(256, stream).close()
    assert planned.report == IterationReport(2, 0, 0, None)
    blocks = [event.action for event in recording.events() if event.address == planned.ptr]
    assert [each for each in blocks if each in ("alloc", "free")] == ["alloc", "free"] * 2
    taker.synchronize()


# ---- streams -------------------------------------------------------------------------------------

HANDED_ON = planned_as((256, 0, 0, 0, 0), (256, 0, 1, 1, 1))


def test_planned_offset_is_reused_by_another_stream_after_its_work(follow, virtual_clock):
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    planned = follow(planned_as((256, 0, 0, 0, 0), *((256, 0, n, n, 1) for n in (1, 2, 3))))
    virtual_clock.set_lag(LAG)
    with planned.iteration():
        planned.allocate(256, first).close()
        planned.allocate(256, second).close()  # records the event, done LAG later
        virtual_clock.advance_clock(LAG - 1)
        planned.allocate(256, second).close()
        assert planned.report == IterationReport(1, 2, 0, None)
        virtual_clock.advance_clock(1)
        planned.allocate(256, second).close()
    assert planned.report == IterationReport(2, 2, 0, None)


def test_wait_policy_reuses_the_offset_behind_a_device_side_wait(follow, virtual_clock):
    driver = HostDriver()
    slow, taker = gpumem.Stream("host"), gpumem.Stream("host")
    planned = follow(HANDED_ON, stream_reuse="wait")
    with driver.block(slow) as gate, planned.iteration():
        buffer = planned.allocate(256, slow)
        driver.fill(buffer, 1, slow)
        buffer.close()
        buffer = planned.allocate(256, taker)
        assert places(planned, buffer) == [0]
        driver.fill(buffer, 2, taker)
        assert not taker.query(), "the taker's stream waits"
        gate.open()
        taker.synchronize()
        assert set(memoryview(buffer)) == {2}
        buffer.close()
    assert planned.report == IterationReport(2, 0, 0, None)


@pytest.mark.parametrize("reuse", ["completed", "wait", "never"])
def test_recorded_stream_delays_reuse_of_the_offset(follow, virtual_clock, reuse):
    driver = HostDriver()
    stream, side = gpumem.Stream("host"), gpumem.Stream("host")
    planned = follow(planned_as((256, 0, 0, 0), (256, 0, 1, 1)), stream_reuse=reuse)
    with driver.block(side), planned.iteration():
        buffer = planned.allocate(256, stream)
        buffer.record_stream(side)
        buffer.close()
        with planned.allocate(256, stream) as second:
            assert places(planned, second) != [0]
    assert planned.report == IterationReport(1, 1, 0, None)
    side.synchronize()
    with planned.iteration():
        planned.allocate(256, stream).close()
        planned.allocate(256, stream).close()
    assert planned.report == IterationReport(2, 0, 0, None)


@pytest.mark.parametrize("share", [False, True])
def test_offset_freed_on_another_stream_is_planned_there_and_elsewhere_later(follow, host, share):
    own, other = gpumem.Stream("host"), gpumem.Stream("host")
    planned = follow(planned_as((256, 0, 0, 0), (256, 0, 1, 1), (256, 0, 2, 2, 1)))
    with HostDriver().block(other), planned.iteration():
        buffer = planned.allocate(256, own)
        view = memoryview(buffer) if share else None
        buffer.close(other)
        del view
        with planned.allocate(256, own) as second:
            assert places(planned, second) != [0], "the other stream may still use it"
        with planned.allocate(256, other) as third:
            assert places(planned, third) == [0]
    assert planned.report == IterationReport(2, 1, 0, None)


def test_closed_plan_gives_its_block_back_after_every_streams_work(make_arena, host):
    own, side = gpumem.Stream("host"), gpumem.Stream("host")
    upstream, pin = one_block(make_arena)
    planned = PlannedResource(planned_as((BLOCK, 0, 0, 0)), upstream)
    with planned.iteration():
        buffer = planned.allocate(BLOCK, own)
        address = buffer.ptr
        buffer.record_stream(side)
        gate = HostDriver().block(side)
        buffer.close()
    opener = threading.Timer(0.01, gate.open)
    opener.start()
    planned.close()
    assert side.query(), "given back while a stream used it"
    opener.join()
    assert next_address(upstream) == address
    pin.close()


def test_stream_reuse_policy_is_the_upstreams(make_arena, follow, virtual_clock):
    slow, taker = gpumem.Stream("host"), gpumem.Stream("host")
    virtual_clock.set_lag(LAG)
    for reuse, planned_count in (("completed", 1), ("wait", 2), ("never", 1)):
        planned = follow(HANDED_ON, make_arena({"stream_reuse": reuse}))
        with planned.iteration():
            planned.allocate(256, slow).close()
            planned.allocate(256, taker).close()
        assert planned.report.planned == planned_count
        virtual_clock.advance_clock(10 * LAG)


@pytest.mark.parametrize("reuse", ["completed", "wait", "never"])
def test_random_programs_over_a_plan_share_no_byte(make_arena, rng, host, reuse):
    streams = [gpumem.Stream("host") for _ in range(3)]
    script = [
        (rng.choice([1, 300, 5 * KIB, 64 * KIB, 200 * KIB]), rng.randrange(3), rng.random())
        for _ in range(60)
    ]

    def step(resource, wild):
        for number, (nbytes, stream, share) in enumerate(script):
            nbytes += rng.random() < wild / 400  # a mismatch, now and then
            buffer = resource.allocate(nbytes, streams[stream])
            tag = patterns.fill(buffer.ptr, nbytes, streams[stream])
            if rng.random() < 0.1:
                patterns.drag(200, streams[stream])
            held.append((buffer, tag, streams[stream]))
            while held and rng.random() < (share + wild * rng.random()) / (1 + wild):
                end(held.pop(rng.randrange(len(held)) if wild else number % len(held)), wild)

    def end(entry, wild):
        buffer, tag, stream = entry
        if wild and rng.random() < 0.3:
            other = rng.choice(streams)
            other.wait(stream.record())
            buffer.record_stream(other)
            patterns.check(buffer.ptr, buffer.nbytes, tag, other, f"{buffer!r}")
        else:
            patterns.check(buffer.ptr, buffer.nbytes, tag, stream, f"{buffer!r}")
        buffer.close()

    patterns, held = Patterns(HostDriver(), 1), []
    arena = make_arena({"stream_reuse": reuse})
    recording = IterationRecording(arena)
    step(recording.resource, 0)
    while held:
        end(held.pop(), 0)
    planned = PlannedResource(plan(recording.trace()), arena)
    at_places = 0
    for turn in range(30):
        with planned.iteration():
            step(planned, turn % 3)
        at_places += planned.report.planned
        planned.check_invariants()
        live = sorted((buffer.ptr, buffer.ptr + buffer.nbytes) for buffer, _, _ in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(live))
        if turn % 2:
            while held:
                end(held.pop(), 1)
        if turn % 4:
            for stream in streams:
                stream.synchronize()
    while held:
        end(held.pop(), 1)
    patterns.settle(everything=True)
    patterns.close()
    assert at_places > len(script)
    assert patterns.checks == 31 * len(script)
    planned.close()


# ---- threads, forks, graphs ----------------------------------------------------------------------


def test_threads_share_an_iteration_without_sharing_an_offset(follow):
    count = 64
    planned = follow(planned_as(*((1000, 1024 * n, n, 99) for n in range(count))))
    buffers, barrier = [], threading.Barrier(4)

    def take():
        barrier.wait()
        for _ in range(count // 4):
            buffers.append(planned.allocate(1000))

    for _ in range(20):
        with planned.iteration():
            threads = [threading.Thread(target=take) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert planned.report == IterationReport(count, 0, 0, None)
            assert sorted(places(planned, *buffers)) == [1024 * n for n in range(count)]
        buffers.clear()


def test_view_dropped_by_another_thread_frees_its_offset(follow):
    planned = follow(THREE)
    with planned.iteration():
        views = [np.asarray(memoryview(planned.allocate(1000)))]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    with planned.iteration():
        assert places(planned, planned.allocate(1000)) == [0]


def test_capture_is_served_by_the_upstreams_graph_pool(make_arena):
    arena, stream = make_arena(), gpumem.Stream("host")
    planned = PlannedResource(THREE, arena)
    with planned.iteration():
        planned.allocate(1000, stream).close()
        with arena.capture(stream) as pool:
            buffer = planned.allocate(500, stream)
        assert pool.stats().in_use == 512
        assert planned.report == IterationReport(1, 0, 0, None), "it is not counted"
        buffer.close()
        with planned.allocate(500, stream) as after:
            assert places(planned, after) == [1024]
    pool.close()
    planned.close()


def test_forked_child_cannot_allocate():
    run_quietly("""
        import os, gpumem
        from gpumem.planning import IterationPlan, PlannedResource
        plan = IterationPlan([1000], [0], [0], [0], [0])
        planned = PlannedResource(plan, gpumem.Arena("host"))
        with planned.iteration():
            buffer = planned.allocate(1000)
            child = os.fork()
            if child == 0:
                try:
                    planned.allocate(1000)
                except gpumem.errors.ClosedError:
                    os._exit(0)
                os._exit(1)
            _, status = os.waitpid(child, 0)
            assert status == 0
            buffer.close()
        planned.close()
    """)


# ---- arguments, life -----------------------------------------------------------------------------


def test_any_resource_can_be_the_upstream(follow):
    plain = Plain()
    planned = follow(THREE, plain)
    assert plain.taken[0][:2] == (planned.ptr, THREE.peak_bytes)
    with planned.iteration():
        planned.allocate(1000).close()
        planned.allocate(7).close()
    assert planned.report.planned == 1
    limited = gpumem.adaptors.limit(gpumem.Arena("host"), THREE.peak_bytes + 100)
    planned = follow(THREE, limited)
    with pytest.raises(OutOfMemoryError):
        planned.allocate(101)


def test_invalid_plan_or_missing_memory_is_refused_and_holds_nothing(make_arena):
    arena = make_arena({"max_mem": 1024, "backing": "regions"})
    with pytest.raises(TypeError, match="IterationPlan"):
        PlannedResource([], arena)
    with pytest.raises(TypeError, match="upstream"):
        PlannedResource(THREE, None)
    with pytest.raises(ConfigError, match="no allocation"):
        PlannedResource(IterationPlan([], [], [], [], []), arena)
    with pytest.raises(gpumem.errors.ModelGraphError, match="overlap"):
        PlannedResource(planned_as((1, 0, 0, 1), (1, 0, 1, 1)), arena)
    with pytest.raises(ConfigError, match="stream_reuse"):
        PlannedResource(THREE, arena, stream_reuse="sometimes")
    with pytest.raises(OutOfMemoryError):
        PlannedResource(THREE, arena)
    assert arena.stats().in_use == 0
    planned = PlannedResource(planned_as((1, 0, 0, 1)), arena)
    with pytest.raises(TypeError, match="twice"):
        planned.__init__(THREE, arena)
    for bad, error in ((-1, ValueError), ("1", TypeError), (1.0, TypeError)):
        with planned.iteration(), pytest.raises(error):
            planned.allocate(bad)
        assert planned.report.mismatch == "it ended after 0 of 1 allocations"
    with planned.iteration(), pytest.raises(ValueError, match="alignment"):
        planned.allocate(1, alignment=3)
    planned.close()


def test_iterations_may_not_overlap(follow):
    planned = follow(THREE)
    with planned.iteration():
        with pytest.raises(ConcurrentRunError), planned.iteration():
            pass
        with pytest.raises(ConcurrentRunError):
            planned.close()
        assert places(planned, planned.allocate(1000)) == [0], "it goes on as before"
    with pytest.raises(ZeroDivisionError), planned.iteration():
        1 / 0  # noqa: B018
    with planned.iteration():
        pass


def test_closed_resource_refuses_every_call(make_arena):
    planned = PlannedResource(THREE, make_arena())
    assert not planned.closed
    planned.close()
    planned.close()
    assert planned.closed
    for call in (lambda: planned.allocate(1), lambda: planned.allocate_persistent(1)):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError), planned.iteration():
        pass


def test_tensor_can_be_made_of_a_planned_block(follow):
    planned = follow(THREE)
    with planned.iteration():
        tensor = gpumem.empty(250, "float32", resource=planned)
        assert tensor.ptr == planned.ptr
        del tensor

"""Graph capture: captured memory is private, and nothing illegal is called meanwhile."""

import contextlib
import gc

import pytest
from helpers.graph import GLOBAL, RELAXED, THREAD_LOCAL, Graph

import gpumem

KIB, MIB = 1 << 10, 1 << 20
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


def addresses(thing):
    """Return every byte range that an arena or pool holds."""
    return [
        range(block.address, block.address + block.allocated_nbytes) for block in thing.blocks()
    ]


def lies_in(buffer, thing):
    return any(buffer.ptr in part for part in addresses(thing))


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_large_block_of_a_graph_pool_takes_what_it_needs(make_arena, driver, stream, backing):
    """What a pool has beyond its blocks would serve no other work."""
    arena = make_arena({"backing": backing})
    with arena.capture(stream) as pool, Graph(driver, stream) as graph:
        blocks = [arena.allocate(nbytes, stream) for nbytes in (40 * MIB, 66 * MIB)]
    assert pool.stats().reserved == (40 + 66) * MIB
    for block in blocks:
        block.close()
    graph.destroy()
    pool.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_captured_memory_belongs_to_the_graph_pool_alone(make_arena, driver, stream, mode, backing):
    arena = make_arena({"backing": backing})
    arena.allocate(MIB, stream).close()
    with arena.capture(stream) as pool, Graph(driver, stream, mode) as graph:
        first = arena.allocate(300 * KIB, stream)
        driver.fill(first, 1, stream)
        address = first.ptr
        first.close()
        again = arena.allocate(300 * KIB, stream)
        assert again.ptr == address, "used again inside the capture"
        eager = arena.allocate(300 * KIB, gpumem.Stream("host"))
        assert lies_in(again, pool)
        assert not lies_in(again, arena)
        assert not lies_in(eager, pool)
    again.close()
    after = [arena.allocate(300 * KIB, stream) for _ in range(8)]
    assert not any(lies_in(buffer, pool) for buffer in after)
    graph.destroy()
    pool.check_invariants()
    pool.close()
    assert pool.closed


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_budget_that_refuses_leaves_what_is_idle_in_a_graphs_pool(
    make_arena, driver, stream, backing
):
    budget = gpumem.Budget("64MiB")
    config = {"backing": backing, "oom_wait_ms": 0}
    if backing == "regions":
        config["extend_strategy"] = "same_as_requested"
    arena, other = (make_arena(config, budget=budget) for _ in range(2))
    with arena.capture(stream) as pool, Graph(driver, stream) as graph:
        scratch = arena.allocate(30 * MIB, stream)
        driver.fill(scratch, 1, stream)
        scratch.close()
    graph.instantiate()
    held = budget.used
    arena.allocate(10 * MIB).close()
    with pytest.raises(gpumem.errors.BudgetExceededError):
        other.allocate(36 * MIB)
    assert budget.used == held + 10 * MIB
    graph.launch()
    with other.allocate(30 * MIB):  # what is idle in the arena itself goes back
        assert budget.used == held + 30 * MIB
    graph.launch()
    stream.synchronize()
    graph.destroy()
    graph.destroy_instance()
    pool.close()


@pytest.mark.parametrize("policy", ["completed", "wait", "never"])
def test_graph_launches_and_eager_work_share_no_byte(make_arena, driver, stream, policy):
    arena = make_arena({"stream_reuse": policy})
    with arena.capture(stream) as pool, Graph(driver, stream) as graph:
        scratch = arena.allocate(200 * KIB, stream)
        driver.fill(scratch, 1, stream)
        scratch.close()
        out = arena.allocate(100 * KIB, stream)
        driver.fill(out, 2, stream)
    graph.instantiate()
    other = gpumem.Stream("host")
    for step in range(50):
        graph.launch()
        live = [arena.allocate(KIB * 37 * i + 1, s) for i in range(6) for s in (stream, other)]
        for buffer in live:
            driver.fill(buffer, 100 + step, buffer.stream)
        stream.synchronize()
        other.synchronize()
        assert set(memoryview(out)) == {2}
        assert all(set(memoryview(buffer)) == {100 + step} for buffer in live)
    out.close()
    graph.destroy()
    graph.destroy_instance()
    pool.close()


@pytest.mark.parametrize("mode", MODES)
def test_growth_and_cache_misses_leave_the_capture_valid(driver, stream, mode, arena):
    """Other streams grow, record and ask events while the stream captures."""
    others = [gpumem.Stream("host") for _ in range(2)]
    with arena.capture(stream), Graph(driver, stream, mode) as graph:
        held = []
        for i in range(12):
            held.append(arena.allocate(MIB * (1 + i % 3), stream))
            driver.fill(held[-1], i, stream)
            arena.allocate(MIB * (i + 1), others[i % 2]).close()
        arena.shrink()
        arena.stats()
        arena.allocate_persistent(MIB)
        gpumem.Arena("host").close()
    held.clear()
    graph.instantiate()
    graph.launch()
    stream.synchronize()
    graph.destroy()
    graph.destroy_instance()


def test_free_on_a_capturing_stream_records_no_event(driver, stream, arena):
    before = arena.allocate(MIB, stream)
    other = gpumem.Stream("host")
    with arena.capture(stream), Graph(driver, stream) as graph:
        before.close()
        for nbytes in (KIB, MIB, 5 * MIB):
            arena.allocate(nbytes, other).close()
        arena.shrink()
    graph.destroy()
    arena.allocate(MIB, other).close()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_block_freed_on_a_capturing_stream_serves_other_streams_after_the_capture(
    make_arena, driver, stream, host, backing
):
    """An event that became a part of the graph would never complete."""
    arena = make_arena({"backing": backing, "max_mem": 8 * MIB, "oom_wait_ms": 0})
    before, other = arena.allocate(8 * MIB, stream), gpumem.Stream("host")
    recorded = host.call_count("cuEventRecord")
    with Graph(driver, stream, RELAXED) as graph:
        before.close()
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(8 * MIB, other)
        arena.shrink()
        assert host.call_count("cuEventRecord") == recorded
    assert graph.handle, "the capture is valid"
    graph.destroy()
    stream.synchronize()
    arena.allocate(8 * MIB, other).close()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_freed_block_waits_while_the_driver_does_not_say_whether_its_stream_captures(
    make_arena, stream, host, backing
):
    arena = make_arena({"backing": backing, "max_mem": 8 * MIB, "oom_wait_ms": 0})
    arena.allocate(8 * MIB, stream).close()
    other, recorded = gpumem.Stream("host"), host.call_count("cuEventRecord")
    host.fail("cuStreamGetCaptureInfo", 1, INVALID_VALUE, 1000)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(8 * MIB, other)
    host.clear_faults()
    assert host.call_count("cuEventRecord") == recorded
    arena.allocate(8 * MIB, other).close()


@pytest.mark.parametrize("mode", MODES)
def test_undeclared_capture_gets_a_graph_pool_at_the_first_miss(driver, stream, mode, arena):
    with Graph(driver, stream, mode) as graph:
        first = arena.allocate(MIB, stream)
        second = arena.allocate(KIB, stream)
        driver.fill(first, 1, stream)
    assert arena.stats().reserved == 0
    after = arena.allocate(KIB, stream)
    assert lies_in(after, arena)
    graph.instantiate()
    graph.destroy()
    first.close()
    second.close()
    with pytest.raises(gpumem.errors.InUseError):
        arena.close()  # the instance may be launched
    graph.launch()
    stream.synchronize()
    graph.destroy_instance()
    after.close()
    arena.close()


@pytest.mark.parametrize("end", ["another capture", "shrink", "reset_stream", "out of memory"])
def test_pool_of_an_undeclared_capture_goes_with_its_graph(make_arena, driver, stream, host, end):
    arena = make_arena({"backing": "regions", "max_mem": 48 * MIB})
    used = host.used(0)
    with Graph(driver, stream) as graph:
        arena.allocate(20 * MIB, stream).close()
    graph.destroy()
    assert host.used(0) > used
    if end == "another capture":
        side = gpumem.Stream("host")
        with arena.capture(side):
            arena.allocate(20 * MIB, side).close()
    elif end == "out of memory":
        arena.allocate(40 * MIB).close()
    else:
        arena.shrink() if end == "shrink" else arena.reset_stream(stream)
        gpumem.Arena("host").close()
        assert host.used(0) == used


@pytest.mark.parametrize("how", ["capture", "add_stream"])
def test_undeclared_capture_that_is_over_leaves_its_stream_to_others(
    make_arena, driver, stream, how
):
    arena, side = make_arena(), gpumem.Stream("host")
    with Graph(driver, side) as graph:
        arena.allocate(8 * MIB, side).close()
    graph.destroy()
    with contextlib.ExitStack() as stack:
        if how == "capture":
            stack.enter_context(Graph(driver, side))
            pool = stack.enter_context(arena.capture(side))
        else:
            pool = stack.enter_context(arena.capture(stream))
            stack.enter_context(Graph(driver, stream))
            side.wait(stream.record())
            pool.add_stream(side)
            stack.callback(lambda: stream.wait(side.record()))
        assert lies_in(arena.allocate(KIB, side), pool)


def test_arena_closes_after_an_undeclared_capture_ended(make_arena, driver, stream):
    arena = make_arena({"backing": "regions"})
    with Graph(driver, stream) as graph:
        buffer = arena.allocate(MIB, stream)
        with pytest.raises(gpumem.errors.InUseError, match="a capture uses it"):
            arena.close()
    buffer.close()
    with pytest.raises(gpumem.errors.InUseError, match=r"in use by 1 graph; drop"):
        arena.close()
    graph.destroy()
    arena.close()
    assert arena.closed


def test_graph_pool_lives_as_long_as_its_graphs_and_instances(driver, stream, host, arena):
    gc.collect()
    arena.shrink()  # what earlier arenas left goes now
    used = host.used(0)
    with arena.capture(stream) as pool, Graph(driver, stream) as graph:
        arena.allocate(MIB, stream).close()
    pool.retain_with(graph.handle)
    assert pool.num_graphs == 1
    with pytest.raises(gpumem.errors.InUseError, match=r"in use by 1 graph; drop"):
        pool.close()
    graph.instantiate()
    graph.destroy()
    del pool
    arena.shrink()
    assert host.used(0) > used
    graph.destroy_instance()
    arena.shrink()
    assert host.used(0) == used


def test_several_captures_share_a_graph_pool(driver, stream, arena):
    with arena.capture(stream) as pool, Graph(driver, stream) as graph:
        buffer = arena.allocate(MIB, stream)
        address = buffer.ptr
        buffer.close()
    graph.destroy()
    other = gpumem.Stream("host")
    with arena.capture(other, pool=pool) as same, Graph(driver, other) as graph:
        assert same is pool
        with arena.allocate(MIB, other) as buffer:
            assert buffer.ptr == address
    graph.destroy()


@pytest.mark.parametrize("end", ["record_stream", "close"])
def test_capture_leaves_blocks_of_the_pool_that_other_work_still_uses(
    make_arena, driver, stream, end
):
    arena, side = make_arena(), gpumem.Stream("host")
    with arena.capture(stream) as pool, Graph(driver, stream) as graph:
        buffer = arena.allocate(MIB, stream)
    address = buffer.ptr
    with driver.block(side):
        driver.fill(buffer, 1, side)  # outside of the capture
        if end == "record_stream":
            buffer.record_stream(side)
            buffer.close()
        else:
            buffer.close(side)
        with arena.capture(stream, pool=pool), arena.allocate(MIB, stream) as other:
            assert other.ptr != address
    side.synchronize()
    with arena.capture(stream, pool=pool):
        both = [arena.allocate(MIB, stream) for _ in range(2)]
        assert address in [each.ptr for each in both]
    graph.destroy()


def test_pool_passes_no_handle_to_the_driver_after_the_arenas_reset_of_it(
    make_arena, driver, stream, host
):
    arena, raw = make_arena(), int(stream.ptr)
    with arena.capture(raw) as pool, Graph(driver, stream) as graph:
        buffer = arena.allocate(MIB, raw)
    graph.destroy()
    stream.synchronize()
    arena.reset_stream(raw)
    buffer.close()
    recorded = host.call_count("cuEventRecord"), host.call_count("cuStreamQuery")
    pool.close()
    assert (host.call_count("cuEventRecord"), host.call_count("cuStreamQuery")) == recorded


def test_end_of_a_nested_context_ends_the_service_of_its_stream(make_arena, stream):
    arena, side = make_arena(), gpumem.Stream("host")
    with arena.capture(stream) as pool:
        with arena.capture(side, pool=pool):
            assert lies_in(arena.allocate(KIB, side), pool)
        assert not lies_in(arena.allocate(KIB, side), pool)
        assert lies_in(arena.allocate(KIB, stream), pool)


def test_joined_stream_is_served_from_the_pool_until_the_context_ends(driver, stream, arena):
    joined = gpumem.Stream("host")
    with arena.capture(stream) as pool:
        pool.add_stream(joined)
        assert lies_in(arena.allocate(MIB, joined), pool)
        assert pool.capturing
    assert not pool.capturing
    assert not lies_in(arena.allocate(MIB, joined), pool)
    with pytest.raises(gpumem.errors.InUseError, match="it is not capturing"):
        pool.add_stream(joined)


def test_captures_nest_for_different_streams_only(make_arena, stream):
    arena, other = make_arena(), gpumem.Stream("host")
    with arena.capture(stream) as outer, arena.capture(other) as inner:
        assert lies_in(arena.allocate(KIB, stream), outer)
        assert lies_in(arena.allocate(KIB, other), inner)
        with pytest.raises(gpumem.errors.InUseError, match="already"), arena.capture(stream):
            pass
        with pytest.raises(gpumem.errors.InUseError, match="a capture uses it"):
            outer.close()
        with pytest.raises(gpumem.errors.InUseError):
            arena.close()
    assert not lies_in(arena.allocate(KIB, stream), outer)


def test_capture_left_without_being_entered_is_an_error(stream, arena):
    capture = arena.capture(stream)
    with pytest.raises(gpumem.errors.GpumemError, match="is not entered"):
        capture.__exit__(None, None, None)
    with capture as pool:
        assert lies_in(arena.allocate(KIB, stream), pool)
    with pytest.raises(gpumem.errors.GpumemError, match="is not entered"):
        capture.__exit__(None, None, None)
    pool.close()


def test_max_mem_bounds_an_arena_and_its_pools_together(make_arena, stream):
    arena = make_arena({"max_mem": 4 * MIB, "backing": "regions"})
    with arena.capture(stream) as pool:
        buffer = arena.allocate(2 * MIB, stream)
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(3 * MIB, stream)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(3 * MIB)
    buffer.close()
    pool.close()
    arena.allocate(3 * MIB).close()


def test_exhaustion_takes_no_memory_from_a_graph_pool(driver, stream, host, arena):
    # The first graph may write what it freed whenever it is launched.
    with arena.capture(stream) as pool, Graph(driver, stream) as first:
        arena.allocate(MIB, stream).close()
    held = pool.stats().reserved
    with arena.capture(stream, pool=pool), Graph(driver, stream) as second:
        host.fail("cuMemCreate", 1, OUT_OF_MEMORY, times=100)
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(64 * MIB, stream)
        host.clear_faults()
    assert pool.stats().reserved == held
    first.destroy()
    second.destroy()


def test_steady_state_beside_a_graph_pool_makes_no_driver_call(driver, stream, host, arena):
    with arena.capture(stream):
        arena.allocate(MIB).close()
        calls = host.call_count()
        for _ in range(100):
            arena.allocate(MIB).close()
        assert host.call_count() == calls


def test_capture_rejects_invalid_arguments(make_arena, driver, stream):
    arena = make_arena()
    with pytest.raises(TypeError, match="must be a GraphPool"):
        arena.capture(stream, pool=3)
    with make_arena().capture(stream) as pool, pytest.raises(ValueError, match="not a pool of"):
        arena.capture(stream, pool=pool)
    for graph, error in ((0, ValueError), (-1, ValueError), ("1", TypeError), (None, TypeError)):
        with pytest.raises(error):
            pool.retain_with(graph)
    with pytest.raises(gpumem.errors.DriverError):
        pool.retain_with(12345)
    assert pool.num_graphs == 0
    pool.close()
    with pytest.raises(gpumem.errors.ClosedError), pool.arena.capture(stream, pool=pool):
        pass
    with pytest.raises(TypeError, match="made by an arena"):
        gpumem.GraphPool.__new__(gpumem.GraphPool).stats()

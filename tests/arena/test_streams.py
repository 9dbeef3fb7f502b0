"""Blocks between streams: reuse only when that is safe, and with few driver calls."""

import pytest
from helpers.driver import HostDriver
from helpers.single_block import BLOCK, can_have_it, single_block_arena

import gpumem

KIB, MIB = 1 << 10, 1 << 20
LAG = 1_000_000  # ns
POLICIES = ["completed", "wait", "never"]


@pytest.fixture
def driver(virtual_clock):
    """Work for streams; on the virtual clock a query lets every worker do what it can first."""
    return HostDriver()


# ---- driver calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_one_stream_in_steady_state_makes_no_driver_call(make_arena, streams, host, rng, policy):
    arena, stream = make_arena({"stream_reuse": policy}), streams[0]
    held = [arena.allocate(4 * MIB, stream)]
    held.clear()
    calls = host.call_count()
    for _ in range(2000):
        held.append(arena.allocate(rng.randrange(1, 30 * KIB), stream))
        if len(held) > 20:
            held.pop(rng.randrange(len(held)))
    held.clear()
    assert host.call_count() == calls


def test_switching_streams_without_a_free_records_no_event(arena, streams, host):
    records = host.call_count("cuEventRecord")
    held = [arena.allocate(256, streams[i % 3]) for i in range(30)]
    assert host.call_count("cuEventRecord") == records
    held.clear()


def test_stream_switch_records_at_most_one_event_and_a_free_none(arena, streams, host):
    warm = [arena.allocate(4 * KIB, stream) for stream in streams for _ in range(16)]
    warm.clear()
    records = host.call_count("cuEventRecord")
    switches = 60
    for i in range(switches):
        held = [arena.allocate(KIB, streams[i % 3]) for _ in range(5)]
        held.clear()
    assert host.call_count("cuEventRecord") - records <= switches
    records = host.call_count("cuEventRecord")
    for _ in range(100):
        arena.allocate(KIB, streams[0]).close()
    assert host.call_count("cuEventRecord") - records <= 1


def test_cache_miss_polls_each_outstanding_event_once(make_arena, streams, virtual_clock):
    arena = make_arena(
        {"max_mem": 3 * MIB, "extend_strategy": "same_as_requested", "oom_wait_ms": 0}
    )
    virtual_clock.set_lag(LAG)
    held = [arena.allocate(MIB, stream) for stream in streams]
    held.clear()
    taker = gpumem.Stream("host")
    queries = virtual_clock.call_count("cuEventQuery")
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(256, taker)
    # In the search, before the arena grows, before regions go back, and in the end.
    assert virtual_clock.call_count("cuEventQuery") - queries <= 4 * len(streams)


def test_all_that_a_stream_freed_in_many_pieces_is_free_for_others_at_once(make_arena, streams):
    arena = make_arena({"backing": "virtual"})
    blocks = [arena.allocate(256 * KIB, streams[0]) for _ in range(1200)]
    reserved = arena.stats().reserved
    freed = {block.ptr for block in blocks[::2]}
    for block in blocks[::2]:
        block.close()
    again = [arena.allocate(256 * KIB, streams[1]) for _ in freed]
    assert {block.ptr for block in again} == freed
    assert arena.stats().reserved == reserved
    arena.check_invariants()
    for block in (*blocks, *again):
        block.close()


def test_stream_has_all_that_another_freed_on_both_sides_of_free_memory(make_arena, streams):
    owner, other, _ = streams
    arena = make_arena(
        {"backing": "regions", "split_rule": "tight", "max_mem": 32 * MIB, "oom_wait_ms": 0}
        | {"initial_chunk_size_bytes": 32 * MIB}
    )
    first, second, above, pin = (arena.allocate(n * MIB, owner) for n in (9, 9, 9, 5))
    first.close()
    second.close()
    arena.allocate(18 * MIB, other).close()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(19 * MIB, owner)  # the 18 MiB are free for every stream since
    above.close()
    below = arena.allocate(10 * MIB, owner)
    between = arena.allocate(3 * MIB, owner)
    place = between.ptr
    between.close()
    # Freed by the owner: 3 MiB and 9 MiB; between them 5 MiB are free for every stream.
    with arena.allocate(17 * MIB, other) as block:
        assert block.ptr == place
    arena.check_invariants()
    below.close()
    pin.close()


# ---- the three policies --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_freeing_stream_reuses_its_block_at_once(make_arena, streams, virtual_clock, policy):
    arena, pin = single_block_arena(make_arena, policy, streams[0])
    virtual_clock.set_lag(LAG)
    arena.allocate(BLOCK, streams[0]).close()
    assert can_have_it(arena, streams[0])
    pin.close()


@pytest.mark.parametrize("policy", ["completed", "wait"])
def test_block_with_completed_work_is_reused_by_any_stream(make_arena, streams, policy):
    arena, pin = single_block_arena(make_arena, policy, streams[0])
    arena.allocate(BLOCK, streams[0]).close()
    streams[0].synchronize()
    assert can_have_it(arena, streams[1])
    assert can_have_it(arena, streams[2])
    pin.close()


def test_completed_policy_reuses_a_block_only_after_its_work(make_arena, streams, virtual_clock):
    arena, pin = single_block_arena(make_arena, "completed", streams[0])
    virtual_clock.set_lag(LAG)
    arena.allocate(BLOCK, streams[0]).close()
    assert not can_have_it(arena, streams[1])  # records the event, done LAG later
    virtual_clock.advance_clock(LAG - 1)
    assert not can_have_it(arena, streams[1])
    virtual_clock.advance_clock(1)
    assert can_have_it(arena, streams[1])
    pin.close()


def test_completed_policy_leaves_a_block_to_a_blocked_stream(make_arena, streams, driver):
    arena, pin = single_block_arena(make_arena, "completed", streams[0])
    buffer = arena.allocate(BLOCK, streams[0])
    with driver.block(streams[0]):
        driver.fill(buffer, 1, streams[0])
        buffer.close()
        for stream in (streams[1], streams[2], None):
            assert not can_have_it(arena, stream)
    streams[0].synchronize()
    assert can_have_it(arena, streams[1])
    pin.close()


def test_wait_policy_reuses_at_once_behind_a_device_side_wait(make_arena, streams, driver):
    slow, taker, _ = streams
    arena, pin = single_block_arena(make_arena, "wait", slow)
    buffer = arena.allocate(BLOCK, slow)
    gate = driver.block(slow)
    driver.fill(buffer, 1, slow)
    buffer.close()
    buffer = arena.allocate(BLOCK, taker)
    driver.fill(buffer, 2, taker)
    assert not taker.query(), "the taker's stream waits"
    gate.open()
    taker.synchronize()
    assert set(memoryview(buffer)) == {2}
    buffer.close()
    pin.close()


def test_never_policy_reuses_on_the_same_stream_until_it_is_reset(make_arena, streams):
    arena, pin = single_block_arena(make_arena, "never", streams[0])
    arena.allocate(BLOCK, streams[0]).close()
    streams[0].synchronize()
    assert not can_have_it(arena, streams[1])
    assert can_have_it(arena, streams[0])
    arena.reset_stream(streams[0])
    assert can_have_it(arena, streams[1])
    assert not can_have_it(arena, streams[0])
    pin.close()


def test_never_policy_holds_through_a_shrink(make_arena, streams):
    arena, pin = single_block_arena(make_arena, "never", streams[0])
    arena.allocate(BLOCK, streams[0]).close()
    arena.shrink()
    assert not can_have_it(arena, streams[1])
    pin.close()


def test_never_policy_records_no_event(make_arena, streams, host):
    arena = make_arena({"stream_reuse": "never"})
    records = host.call_count("cuEventRecord")
    for i in range(60):
        arena.allocate(KIB, streams[i % 3]).close()
    arena.shrink()
    assert host.call_count("cuEventRecord") == records


def test_pending_work_counts_from_the_free_not_the_allocation(make_arena, streams, virtual_clock):
    first, second, third = streams
    arena, pin = single_block_arena(make_arena, "completed", first)
    virtual_clock.set_lag(LAG)
    buffer = arena.allocate(BLOCK, first)
    buffer.close(second)
    assert buffer.stream == second
    first.synchronize()
    assert not can_have_it(arena, first)
    assert not can_have_it(arena, third)
    assert can_have_it(arena, second)
    pin.close()


def test_blocks_pending_on_two_streams_do_not_merge(make_arena, streams, virtual_clock):
    arena = make_arena({"backing": "regions", "split_rule": "tight"})
    virtual_clock.set_lag(LAG)
    buffers = [arena.allocate(MIB // 2, stream) for stream in streams[:2]]
    buffers.clear()
    blocks = [(block.allocated_nbytes, block.stream) for block in arena.blocks()]
    assert blocks == [(MIB // 2, streams[0].ptr), (MIB // 2, streams[1].ptr)]
    for stream in streams:
        stream.synchronize()
        arena.reset_stream(stream)
    assert [(block.allocated_nbytes, block.stream) for block in arena.blocks()] == [(MIB, 0)]


# ---- reset ---------------------------------------------------------------------------------------


def test_reset_stream_clears_exactly_that_streams_blocks(make_arena, streams):
    arena = make_arena({"stream_reuse": "never", "split_rule": "tight"})
    buffers = [arena.allocate(100 * KIB, streams[i % 2]) for i in range(4)]
    buffers.clear()
    arena.reset_stream(streams[0])
    marks = {block.stream for block in arena.blocks()}
    assert marks == {0, streams[1].ptr}


def test_reset_stream_merges_its_blocks_between_those_of_others(make_arena):
    """In address order: a block of `other`, a free and a kept one of `drained`, one of `other`."""
    arena = make_arena({"backing": "regions", "split_rule": "tight"})
    drained, other = gpumem.Stream("host"), gpumem.Stream("host")
    sizes = [(100 * KIB, other), (100 * KIB, drained), (KIB, drained), (100 * KIB, other)]
    first, free, kept, last = [arena.allocate(size, stream) for size, stream in sizes]
    for buffer in (free, kept, first, last):
        buffer.close()
    drained.synchronize()
    arena.reset_stream(drained)
    arena.check_invariants()
    assert [(block.allocated_nbytes, block.stream) for block in arena.blocks()] == [
        (MIB, other.ptr)
    ]


def test_reset_stream_leaves_blocks_that_another_stream_took_over(make_arena, streams):
    arena, pin = single_block_arena(make_arena, "completed", streams[0])
    arena.allocate(BLOCK, streams[0]).close()
    streams[0].synchronize()
    taken = arena.allocate(BLOCK, streams[1])
    arena.reset_stream(streams[0])
    assert arena.stats().in_use == MIB
    assert [(block.used, block.stream) for block in arena.blocks()] == [
        (True, streams[0].ptr),
        (True, streams[1].ptr),
    ]
    taken.close()
    pin.close()


def test_stream_with_live_blocks_survives_its_reset(make_arena, streams, host):
    """The block will be freed on it, and an event recorded there: it must still exist then."""
    arena = make_arena({"backing": "regions"})
    stream = gpumem.Stream("host")
    handle = stream.ptr
    buffer = arena.allocate(KIB, stream)
    arena.reset_stream(stream)
    del stream
    assert (buffer.stream.ptr, buffer.stream.query()) == (handle, True)
    buffer.close()
    failed = arena.stats().driver_calls
    arena.allocate(KIB, streams[0]).close()
    assert arena.stats().driver_calls - failed <= 3
    assert arena.allocate(900 * KIB, streams[0]).nbytes
    assert arena.stats().num_extensions == 1, "the block came back"


def test_view_keeps_the_stream_of_the_close_alive(arena, host):
    stream = gpumem.Stream("host")
    destroyed = host.call_count("cuStreamDestroy")
    buffer = arena.allocate(KIB)
    view = memoryview(buffer)
    buffer.close(stream)
    arena.reset_stream(stream)
    del stream
    assert host.call_count("cuStreamDestroy") == destroyed
    view.release()


def test_reset_releases_a_stream_without_live_blocks(arena, host):
    stream = gpumem.Stream("host")
    arena.allocate(KIB, stream).close()
    destroyed = host.call_count("cuStreamDestroy")
    arena.reset_stream(stream)
    del stream
    assert host.call_count("cuStreamDestroy") == destroyed + 1


def test_wrapper_of_the_same_handle_does_not_replace_the_owner(arena, host):
    stream = gpumem.Stream("host")
    buffers = [arena.allocate(KIB, stream)]
    buffers.append(arena.allocate(KIB, gpumem.Stream.from_handle("host", stream.ptr)))
    destroyed = host.call_count("cuStreamDestroy")
    del stream
    assert host.call_count("cuStreamDestroy") == destroyed
    assert buffers[0].stream.query()
    buffers.clear()


def test_freed_memory_keeps_its_stream_alive(arena, host):
    stream = gpumem.Stream("host")
    handle = stream.ptr
    destroyed = host.call_count("cuStreamDestroy")
    buffer = arena.allocate(KIB, stream)
    del stream
    buffer.close()
    assert host.call_count("cuStreamDestroy") == destroyed
    assert buffer.stream.ptr == handle


def test_closing_an_arena_releases_its_streams(host):
    stream = gpumem.Stream("host")
    with gpumem.Arena("host") as arena:
        arena.allocate(KIB, stream).close()
    destroyed = host.call_count("cuStreamDestroy")
    del stream
    assert host.call_count("cuStreamDestroy") == destroyed + 1


# ---- marks of several streams --------------------------------------------------------------------


def shared_region(make_arena, streams):
    """Make an arena of 16 MiB that two streams have used, all of it free for every stream."""
    arena = make_arena(
        {
            "backing": "regions",
            "initial_chunk_size_bytes": 16 * MIB,
            "max_mem": 16 * MIB,
            "split_rule": "tight",
            "oom_wait_ms": 0,
        }
    )
    arena.allocate(4 * MIB, streams[0]).close()
    arena.allocate(4 * MIB, streams[1]).close()
    for stream in streams:
        stream.synchronize()
        arena.reset_stream(stream)
    return arena


@pytest.mark.parametrize(
    ("stream", "mib"),
    [pytest.param(0, 16, id="its own stream has all"), pytest.param(1, 12, id="another the rest")],
)
def test_small_free_leaves_the_large_free_memory_beside_it_to_all_streams(
    make_arena, streams, virtual_clock, stream, mib
):
    arena = shared_region(make_arena, streams)
    virtual_clock.set_lag(LAG)
    arena.allocate(MIB, streams[0]).close(streams[0])
    arena.blocks()  # frees the blocks that the thread has cached
    assert arena.allocate(mib * MIB, streams[stream]).allocated_nbytes == mib * MIB


def test_mark_spreads_over_no_more_than_its_own_size(make_arena, streams, virtual_clock):
    arena = shared_region(make_arena, streams)
    virtual_clock.set_lag(LAG)
    first, second = arena.allocate(6 * MIB, streams[0]), arena.allocate(5 * MIB, streams[0])
    first.close(streams[0])
    assert [b.allocated_nbytes for b in arena.blocks() if not b.used] == [6 * MIB, 5 * MIB]
    second.close(streams[0])
    assert [b.allocated_nbytes for b in arena.blocks()] == [16 * MIB]

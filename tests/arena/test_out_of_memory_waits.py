"""When memory is truly out, an allocation waits for work that other streams have queued."""

import threading

import pytest
from helpers.driver import HostDriver
from helpers.threads import running

import gpumem

MIB = 1 << 20
LAG = 30_000_000  # ns, of real time
HOUR_MS = 3_600_000  # for waits that end when the work is done


def full(make_arena, stream, **config):
    """Make an arena whose memory is all freed on a stream, beside a small block that pins it."""
    arena = make_arena({"max_mem": MIB, "split_rule": "tight"} | config)
    pin = arena.allocate(256, stream)
    return arena, pin, arena.allocate(MIB - 256, stream)


@pytest.mark.parametrize("policy", ["completed", "wait"])
def test_request_waits_for_pending_memory_of_another_stream(make_arena, streams, host, policy):
    arena, pin, buffer = full(make_arena, streams[0], stream_reuse=policy, oom_wait_ms=HOUR_MS)
    host.set_lag(LAG)
    driver = HostDriver()
    driver.fill(buffer, 1, streams[0])
    buffer.close()
    other = arena.allocate(MIB - 256, streams[1])
    driver.fill(other, 2, streams[1])
    streams[1].synchronize()
    streams[0].synchronize()
    assert set(memoryview(other)) == {2}
    other.close()
    pin.close()


@pytest.mark.parametrize("backing", ["virtual", "regions"])
@pytest.mark.parametrize("debug_heap", [False, True])
@pytest.mark.parametrize("kind", ["persistent", "shareable"])
def test_block_with_its_own_region_waits_for_work_of_its_own_stream(
    make_arena, host, kind, debug_heap, backing
):
    """In its stream's order it may not lie where the freed block was: that memory goes back."""
    config = {"max_mem": 8 * MIB, "backing": backing, "oom_wait_ms": HOUR_MS}
    arena = make_arena(config, debug_heap=debug_heap)
    stream = gpumem.Stream.from_handle("host", 0)
    buffer = arena.allocate(4 * MIB, stream)
    host.set_lag(LAG)
    HostDriver().fill(buffer, 1, stream)
    buffer.close()
    if kind == "persistent":
        arena.allocate_persistent(6 * MIB).close()
    else:
        arena.allocate(6 * MIB, stream, shareable=True).close()
    stream.synchronize()


def test_request_waits_for_its_own_stream_where_its_memory_lies_among_small_blocks(
    make_arena, streams, host
):
    """A large paged arena has a range for small blocks, whose pages do not move to large ones."""
    arena = make_arena({"max_mem": 128 * MIB, "backing": "virtual", "oom_wait_ms": HOUR_MS})
    pin = arena.allocate(66 * MIB, streams[0])
    small = [arena.allocate(100_000, streams[0]) for _ in range(500)]
    host.set_lag(LAG)
    HostDriver().fill(small[0], 1, streams[0])
    small.clear()
    arena.allocate(40 * MIB, streams[0]).close()
    pin.close()


@pytest.mark.parametrize("policy", ["completed", "never"])
def test_request_waits_for_a_block_with_a_recorded_stream(make_arena, streams, host, policy):
    arena, pin, buffer = full(make_arena, streams[0], stream_reuse=policy, oom_wait_ms=HOUR_MS)
    buffer.record_stream(streams[1])
    host.set_lag(LAG)
    HostDriver().fill(buffer, 1, streams[1])
    buffer.close()
    arena.allocate(MIB - 256, streams[0]).close()
    assert streams[1].query()
    pin.close()


def test_never_policy_does_not_wait_for_other_streams(make_arena, streams, virtual_clock):
    arena, pin, buffer = full(make_arena, streams[0], stream_reuse="never", oom_wait_ms=HOUR_MS)
    virtual_clock.set_lag(LAG)
    HostDriver().fill(buffer, 1, streams[0])
    buffer.close()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(MIB - 256, streams[1])
    virtual_clock.advance_clock(LAG)
    pin.close()


def test_request_that_can_never_fit_does_not_wait(make_arena, streams, virtual_clock):
    arena, pin, buffer = full(make_arena, streams[0], oom_wait_ms=HOUR_MS)
    virtual_clock.set_lag(LAG)
    buffer.close()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(2 * MIB, streams[1])
    pin.close()


def test_wait_for_a_stream_held_back_by_this_thread_ends(make_arena, streams, host, driver):
    arena, pin, buffer = full(make_arena, streams[0], oom_wait_ms=20)
    before = arena.stats()
    with driver.block(streams[0]):
        driver.fill(buffer, 1, streams[0])
        buffer.close()
        for _ in range(3):
            with pytest.raises(gpumem.OutOfMemoryError):
                arena.allocate(MIB - 256, streams[1])
    assert arena.stats().reserved == before.reserved
    streams[0].synchronize()
    arena.allocate(MIB - 256, streams[1]).close()
    pin.close()


def test_stream_that_timed_out_is_not_waited_for_again(make_arena, streams, virtual_clock):
    """The second refusal would never come, were it to wait for its hour."""
    arena, pin, buffer = full(make_arena, streams[0], oom_wait_ms=20)
    virtual_clock.set_lag(LAG)
    buffer.close()
    queries = []
    for _ in range(2):
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(MIB - 256, streams[1])
        queries.append(virtual_clock.call_count("cuEventQuery"))
    assert queries[1] - queries[0] <= 4
    virtual_clock.advance_clock(LAG)
    arena.allocate(MIB - 256, streams[1]).close()
    pin.close()


def test_other_threads_allocate_while_one_waits(make_arena, streams, virtual_clock):
    arena, pin, buffer = full(make_arena, streams[0], oom_wait_ms=HOUR_MS)
    virtual_clock.set_lag(LAG)
    buffer.close()
    served = []
    with running(lambda: served.append(arena.allocate(MIB - 256, streams[1]))):
        for _ in range(20):
            arena.check_invariants()
            arena.shrink()
        assert not served
        virtual_clock.advance_clock(LAG)
    assert len(served) == 1
    served.clear()
    pin.close()


def test_request_waits_when_the_driver_is_out_of_memory(make_arena, streams, host, leave_room):
    config = {"split_rule": "tight", "extend_strategy": "same_as_requested"}
    arena = make_arena(config | {"oom_wait_ms": HOUR_MS})
    arena.allocate(MIB, streams[0]).close()
    pin, rest = arena.allocate(256, streams[0]), arena.allocate(MIB - 256, streams[0])
    leave_room(0)
    host.set_lag(LAG)
    HostDriver().fill(rest, 1, streams[0])
    rest.close()
    arena.allocate(MIB - 256, streams[1]).close()
    pin.close()


@pytest.mark.parametrize("backing", ["virtual", "regions"])
@pytest.mark.parametrize("change", ["free", "reset", "limit"])
def test_waiting_request_takes_what_another_thread_makes_free(
    make_arena, streams, host, backing, change
):
    """The stream that it waits for never ends meanwhile."""
    arena = make_arena({"max_mem": 12 * MIB, "backing": backing, "oom_wait_ms": HOUR_MS})
    pending, between, held = (arena.allocate(4 * MIB, stream) for stream in streams)
    gate = HostDriver().block(streams[0])
    pending.close()
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(arena.allocate(4 * MIB, streams[1])))
    looks = host.call_count("cuEventQuery")
    waiter.start()
    while host.call_count("cuEventQuery") < looks + 5:  # it looks at the event again and again
        pass
    if change == "free":
        held.close()
    elif change == "limit":
        arena.set_limit(24 * MIB)
    else:
        arena.reset_stream(streams[0])  # nothing that was queued there uses the block
    waiter.join(60)
    assert not waiter.is_alive()
    assert taken[0].nbytes == 4 * MIB
    gate.open()
    between.close()

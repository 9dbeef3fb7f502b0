"""The events that an arena records, asks and waits for: which, how many, and behind whose work."""

import concurrent.futures
import contextlib
import ctypes

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.single_block import BLOCK, MIB, next_address, single_block_arena

import gpumem
from gpumem._testing.arenas import release_retired, stream_slots

KIB = 1 << 10
LAG = 1_000_000  # ns
RAW = 0x7000_0000_0000  # handles that no driver gave out
RECORD, ASK, WAIT = "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"
LEGACY, PER_THREAD = 1, 2
POLICIES = ["completed", "wait", "never"]


@pytest.fixture
def streams():
    return [gpumem.Stream("host") for _ in range(4)]


@pytest.fixture
def driver(virtual_clock):
    return HostDriver()


@pytest.fixture
def calls(host):
    """Count driver calls by name since the last time asked."""
    before = {}
    release_retired()

    def counted(*names):
        found = [host.call_count(name) - before.get(name, 0) for name in names]
        before.update((name, host.call_count(name)) for name in names)
        return found

    counted(RECORD, ASK, WAIT, "cuEventCreate", "cuEventDestroy", "cuCtxSynchronize")
    return counted


@pytest.fixture
def other_thread():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result()


# ---- how many ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_count_every_call_for_an_event(make_arena, streams, virtual_clock, rng, policy):
    virtual_clock.set_lag(LAG)
    arena = make_arena(
        {"stream_reuse": policy, "backing": "regions", "max_mem": 4 * MIB, "oom_wait_ms": 0}
    )
    names = [RECORD, ASK, WAIT, "cuMemAlloc", "cuMemFreeAsync", "cuStreamCreate"]
    before = sum(map(virtual_clock.call_count, names)) - arena.stats().driver_calls
    live = []
    for _ in range(300):
        if live and rng.random() < 0.5:
            buffer = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.3:
                buffer.record_stream(rng.choice(streams))
            buffer.close(rng.choice(streams))
        elif len(live) < 4:
            with contextlib.suppress(gpumem.OutOfMemoryError):
                live.append(arena.allocate(rng.randrange(1, MIB), rng.choice(streams)))
        if rng.random() < 0.2:
            virtual_clock.advance_clock(LAG)
    assert sum(map(virtual_clock.call_count, names)) - arena.stats().driver_calls == before
    virtual_clock.advance_clock(LAG)
    live.clear()


@pytest.mark.parametrize("refused", [0, 1])
def test_each_stream_has_one_event_that_is_destroyed_with_the_arena(streams, host, calls, refused):
    events = host.live()["events"]
    arena = gpumem.Arena("host", {"backing": "regions"})
    for _ in range(10):
        for stream in streams[:3]:
            arena.allocate(MIB, stream).close()
    assert calls("cuEventCreate") == [3]
    if refused:
        host.fail("cuEventDestroy", 1, 1000)
    del arena
    release_retired()
    host.clear_faults()
    assert calls("cuEventDestroy") == [3 + refused], "what the driver refused, once more"
    assert host.live()["events"] == events


def test_events_are_left_alone_where_the_context_cannot_be_entered(streams, host, calls):
    arena = gpumem.Arena("host", {"backing": "regions"})
    for stream in streams[:3]:
        arena.allocate(MIB, stream).close()
    arena.close()
    host.fail("cuCtxPushCurrent", 1, 1, 1000)
    del arena
    release_retired()
    host.clear_faults()
    assert calls("cuEventDestroy") == [0]


@pytest.mark.parametrize("policy", ["completed", "wait"])
def test_block_of_any_stream_is_taken_once_its_work_is_done(make_arena, streams, policy, host):
    default = gpumem.Stream.from_handle("host", 1)
    for freed in (default, *streams):
        arena, pin = single_block_arena(make_arena, policy)
        arena.allocate(BLOCK, freed).close()
        freed.synchronize()
        for taker in (*streams, default):
            assert next_address(arena, taker)
            taker.synchronize()
        pin.close()


def test_wait_policy_takes_a_block_of_the_default_stream(make_arena, streams, virtual_clock, calls):
    arena, pin = single_block_arena(make_arena, "wait")
    virtual_clock.set_lag(LAG)
    arena.allocate(BLOCK).close()
    calls(RECORD, WAIT)
    assert next_address(arena, streams[0])
    assert calls(RECORD, WAIT) == [1, 1]
    virtual_clock.advance_clock(LAG)
    pin.close()


@pytest.mark.parametrize("recorded", [False, True])
def test_allocation_does_not_wait_for_a_block_with_dead_bytes_that_a_budget_refuses(
    make_arena, streams, virtual_clock, calls, recorded
):
    budget = gpumem.Budget(1500 * KIB)
    config = {"stream_reuse": "wait", "split_rule": "ort", "backing": "regions"}
    config |= {"initial_chunk_size_bytes": MIB, "extend_strategy": "same_as_requested"}
    arena = make_arena(config, budget=budget, count="in_use")
    virtual_clock.set_lag(LAG)
    block = arena.allocate(MIB, streams[0])
    if recorded:
        block.record_stream(streams[2])
    block.close()
    other = arena.allocate_persistent(512 * KIB)
    calls(WAIT)
    with pytest.raises(gpumem.errors.BudgetExceededError):
        arena.allocate(700 * KIB, streams[1])
    assert (calls(WAIT), budget.used) == ([0], 512 * KIB)
    other.close()
    again = arena.allocate(700 * KIB, streams[1])
    assert (calls(WAIT), budget.used) == ([1 + recorded], MIB)
    virtual_clock.advance_clock(LAG)
    again.close()


@pytest.mark.parametrize("call", [ASK, "cuCtxPushCurrent"])
def test_failed_query_is_no_completion(make_arena, streams, virtual_clock, call):
    arena, pin = single_block_arena(make_arena)
    virtual_clock.set_lag(LAG)
    arena.allocate(BLOCK, streams[0]).close()
    assert next_address(arena, streams[1]) is None
    virtual_clock.advance_clock(LAG)
    virtual_clock.fail(call, 1, 1, 1000)
    assert next_address(arena, streams[1]) is None
    virtual_clock.clear_faults()
    assert next_address(arena, streams[1])
    virtual_clock.advance_clock(LAG)
    pin.close()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_event_that_completes_after_the_first_look_saves_a_growth(
    make_arena, streams, host, backing
):
    # The event of an idle stream takes the device some microseconds.
    arena = make_arena({"backing": backing})
    arena.allocate(4 * MIB, streams[0]).close()
    reserved = arena.stats().reserved
    host.fail(ASK, 1, 1, 1)
    with arena.allocate(4 * MIB, streams[1]):
        assert arena.stats().reserved == reserved
    assert arena.stats().pages_moved == 0


def test_rest_of_a_new_place_is_shared_once(make_arena, streams, calls):
    """What a stream's new place has beyond its block, and no free has an event for."""
    arena = make_arena({"backing": "virtual", "max_mem": 4 * MIB, "oom_wait_ms": 0})
    block = arena.allocate(MIB, streams[0])
    calls(RECORD)
    for recorded in (1, 0):
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(4 * MIB, streams[1])
        assert calls(RECORD) == [recorded]
    block.close()


def test_refused_request_records_one_event_and_asks_each_look_once(
    make_arena, streams, virtual_clock, calls
):
    arena, pin = single_block_arena(make_arena, "completed")
    virtual_clock.set_lag(LAG)
    arena.allocate(BLOCK, streams[0]).close()
    assert calls(RECORD, ASK, WAIT) == [0, 0, 0]
    assert next_address(arena, streams[1]) is None
    # One look when the event is recorded, one before the arena grows, one before memory is out.
    assert calls(RECORD, ASK, WAIT) == [1, 3, 0]
    assert next_address(arena, streams[1]) is None
    assert calls(RECORD, ASK, WAIT) == [0, 3, 0]
    virtual_clock.advance_clock(LAG)
    assert next_address(arena, streams[1])
    assert calls(RECORD, ASK, WAIT) == [0, 1, 0]
    pin.close()


def test_wait_for_memory_pauses_between_looks(make_arena, streams, virtual_clock, calls):
    arena, pin = single_block_arena(make_arena, "completed", oom_wait_ms=50)
    virtual_clock.set_lag(LAG)
    arena.allocate(BLOCK, streams[0]).close()
    assert next_address(arena, streams[1]) is None
    # Pauses of 20 µs that double up to 1 ms: six, then at most fifty.
    recorded, asked = calls(RECORD, ASK)
    assert recorded == 1
    assert 2 < asked <= 70
    virtual_clock.advance_clock(LAG)
    pin.close()


def test_default_streams_work_is_waited_for(make_arena, streams, host):
    host.set_lag(30_000_000)
    arena = make_arena({"max_mem": MIB, "split_rule": "tight", "oom_wait_ms": 3_600_000})
    pin, buffer = arena.allocate(256), arena.allocate(BLOCK)
    HostDriver().fill(buffer, 1, gpumem.Stream.from_handle("host", 1))
    buffer.close()
    arena.allocate(BLOCK, streams[0]).close()
    pin.close()


def test_reset_covers_what_was_freed_so_that_no_event_is(make_arena, streams, calls):
    arena = make_arena({"backing": "regions"})
    pin = arena.allocate(KIB, streams[0])
    arena.allocate(MIB, streams[0]).close()
    arena.reset_stream(streams[0])
    arena.allocate(MIB, streams[1]).close()
    assert calls(RECORD, ASK) == [0, 0]
    pin.close()


def test_reset_forgets_an_outstanding_event(make_arena, streams, virtual_clock, calls):
    arena = make_arena({"backing": "regions"})
    virtual_clock.set_lag(LAG)
    pin = arena.allocate(KIB, streams[0])
    arena.allocate(MIB, streams[0]).close()
    arena.allocate(MIB, streams[1]).close()
    assert calls(RECORD) == [1]
    arena.reset_stream(streams[0])
    arena.allocate(MIB, streams[1]).close()
    arena.allocate(4 * MIB, streams[1]).close()
    assert calls(RECORD, ASK) == [0, 0]
    virtual_clock.advance_clock(LAG)
    pin.close()


def test_close_does_not_wait_for_work_known_to_be_done(make_arena, streams, virtual_clock, calls):
    arena = make_arena({"backing": "regions"})
    virtual_clock.set_lag(LAG)
    arena.allocate(MIB, streams[0]).close()
    arena.allocate(MIB, streams[1])
    arena.reset_stream(streams[1])
    virtual_clock.advance_clock(LAG)
    calls(RECORD, "cuCtxSynchronize")
    arena.close()
    assert calls(RECORD, "cuCtxSynchronize") == [0, 0]


# ---- behind whose work ---------------------------------------------------------------------------


def test_event_for_another_threads_default_stream_lies_behind_its_work(
    make_arena, streams, driver, other_thread
):
    arena, pin = single_block_arena(make_arena)
    theirs = gpumem.Stream.from_handle("host", PER_THREAD)
    buffer = other_thread(lambda: arena.allocate(BLOCK, theirs))
    gate = other_thread(lambda: driver.block(theirs))
    other_thread(buffer.close)
    assert next_address(arena, streams[0]) is None
    gate.open()
    other_thread(theirs.synchronize)
    assert next_address(arena, streams[0])
    pin.close()


def test_event_for_the_own_default_stream_waits_for_no_other_stream(make_arena, streams, driver):
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, PER_THREAD)
    with driver.block(streams[0]):
        buffer.close()
        assert next_address(arena, streams[1])
    pin.close()


def test_raw_handle_that_was_reset_has_no_event_for_what_is_freed_later(make_arena, streams, calls):
    """It may name no stream any more."""
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, int(streams[0].ptr))
    arena.reset_stream(int(streams[0].ptr))
    calls(RECORD)
    buffer.close()
    assert next_address(arena, streams[1]) is None
    assert calls(RECORD) == [0]
    arena.reset_stream(int(streams[0].ptr))
    assert next_address(arena, streams[1])
    pin.close()


def test_tensor_of_a_raw_handle_that_was_reset_is_ordered_by_the_legacy_stream(make_arena):
    """The stream may have ended, and the tensor lives on."""
    arena, stream = make_arena(), gpumem.Stream("host")
    tensor = gpumem.full(1000, 7, "uint8", resource=arena, stream=int(stream.ptr))
    stream.synchronize()
    arena.reset_stream(int(stream.ptr))
    del stream
    assert tensor.buffer.stream.ptr == LEGACY
    assert (np.from_dlpack(tensor) == 7).all()


def test_copy_into_a_block_of_a_raw_handle_that_was_reset_delays_its_reuse(
    make_arena, streams, driver
):
    arena, pin = single_block_arena(make_arena)
    src = gpumem.full(1000, 7, "uint8", memory="host")
    tensor = gpumem.empty(BLOCK, "uint8", resource=arena, stream=int(streams[0].ptr))
    arena.reset_stream(int(streams[0].ptr))
    with driver.block(streams[1]):
        gpumem.copy(tensor[:1000], src, streams[1])
        del tensor
        pin.record_stream(int(streams[0].ptr))  # names it
        assert next_address(arena, streams[2]) is None
    streams[1].synchronize()
    gpumem.Device("host").synchronize()
    assert next_address(arena, streams[2])
    pin.close()


def test_raw_handle_that_is_named_again_after_its_reset_has_events_again(
    make_arena, streams, virtual_clock, calls
):
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, int(streams[0].ptr))
    arena.reset_stream(int(streams[0].ptr))
    pin.record_stream(int(streams[0].ptr))  # names it
    buffer.close()
    assert next_address(arena, streams[1])
    assert calls(RECORD) == [1]
    pin.close()


def test_free_after_the_event_is_not_covered_by_it(make_arena, streams, virtual_clock):
    arena = make_arena(
        {"backing": "regions", "split_rule": "tight", "max_mem": MIB, "oom_wait_ms": 0}
        | {"initial_chunk_size_bytes": MIB}
    )
    virtual_clock.set_lag(LAG)
    size = MIB // 2 - 256
    first, wall, second, pin = [
        arena.allocate(nbytes, streams[0]) for nbytes in (size, 256, size, 256)
    ]
    places = first.ptr, second.ptr
    first.close()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(size, streams[1])  # records an event
    second.close()
    virtual_clock.advance_clock(LAG)
    taken = arena.allocate(size, streams[1])
    assert taken.ptr == places[0]
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(size, streams[1])
    virtual_clock.advance_clock(LAG)
    again = arena.allocate(size, streams[1])
    assert again.ptr == places[1]
    for buffer in (pin, wall, taken, again):
        buffer.close()


# ---- waits on the device -------------------------------------------------------------------------


def test_taker_waits_once_for_each_stream_that_used_a_block(make_arena, streams, driver, calls):
    owner, side, more, taker = streams
    arena, pin = single_block_arena(make_arena, "wait")
    gates = [driver.block(stream) for stream in (owner, side, more)]
    arena.allocate(BLOCK, owner).close()
    calls(RECORD, WAIT)
    buffer = arena.allocate(BLOCK, taker)
    assert calls(WAIT) == [1]
    for stream in (side, more, taker):
        buffer.record_stream(stream)
    buffer.close()
    arena.allocate(BLOCK, owner).close()
    assert calls(WAIT) == [3]
    for gate in gates:
        gate.open()
    for stream in streams:
        stream.synchronize()
    pin.close()


def owners(arena):
    """Return the free blocks and whose they are; they are free for all once their work is done."""
    return [(block.address, block.stream) for block in arena.blocks() if not block.used]


@pytest.mark.parametrize("limit", ["max_mem", "budget"])
@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_refused_request_queues_no_wait_and_takes_no_memory(
    make_arena, streams, driver, calls, backing, limit
):
    config = {"stream_reuse": "wait", "backing": backing, "oom_wait_ms": 0}
    if backing == "regions":
        config["extend_strategy"] = "same_as_requested"
    budget = gpumem.Budget(64 * MIB) if limit == "budget" else None
    if budget is None:
        config["max_mem"] = 64 * MIB
    arena = make_arena(config, budget=budget)
    pin = arena.allocate(40 * MIB, streams[1])
    buffer = arena.allocate(16 * MIB, streams[0])
    with driver.block(streams[0]):
        buffer.close()
        before = owners(arena)
        calls(WAIT)
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(32 * MIB, streams[1])
        assert calls(WAIT) == [0]
        assert streams[1].query()
        assert owners(arena) == before
    streams[0].synchronize()
    pin.close()


@pytest.mark.parametrize("from_default", [False, True])
def test_block_of_pages_waits_only_for_the_streams_of_its_memory(
    make_arena, streams, driver, calls, from_default
):
    owner, other, taker, _ = streams
    if from_default:
        other = gpumem.Stream.from_handle("host", 1)
    config = {"stream_reuse": "wait", "backing": "virtual", "page_move_threshold": 1000}
    arena = make_arena(config)  # new memory, and no page of the owner's, joins the other's
    first = arena.allocate(16 * MIB, owner)
    pin = arena.allocate(4 * MIB, taker)
    second = arena.allocate(16 * MIB, other)
    address = second.ptr
    with driver.block(owner):
        with driver.block(other):
            first.close()
            second.close()
            calls(WAIT)
            block = arena.allocate(20 * MIB, taker)
            assert block.ptr == address
            assert calls(WAIT) == [1]
            assert not taker.query()
        taker.synchronize()
    owner.synchronize()
    block.close()
    pin.close()


@pytest.mark.parametrize("number", [1, 2])
def test_refused_event_of_a_pending_block_leaves_no_wait_for_the_others(
    make_arena, streams, driver, virtual_clock, calls, number
):
    owner, side, more, taker = streams
    arena, pin = single_block_arena(make_arena, "wait")
    buffer = arena.allocate(BLOCK, owner)
    with driver.block(side), driver.block(more):
        buffer.record_stream(side)
        buffer.record_stream(more)
        buffer.close()
        calls(WAIT)
        virtual_clock.fail(RECORD, number, 1, 1000)
        assert next_address(arena, taker) is None
        virtual_clock.clear_faults()
        assert calls(WAIT) == [0]
        assert taker.query()
        assert next_address(arena, taker)
    for stream in streams:
        stream.synchronize()
    pin.close()


def test_refused_wait_leaves_the_waits_queued_before_it_and_the_block_where_it_is(
    make_arena, streams, driver, virtual_clock, calls
):
    owner, side, _, taker = streams
    arena, pin = single_block_arena(make_arena, "wait")
    buffer = arena.allocate(BLOCK, owner)
    with driver.block(side):
        with driver.block(owner):
            buffer.record_stream(side)
            buffer.close()
            calls(WAIT)
            virtual_clock.fail(WAIT, 2, 1, 1000)
            assert next_address(arena, taker) is None
            virtual_clock.clear_faults()
            assert calls(WAIT) == [2]
            assert not taker.query(), "behind the owner's work"
        taker.synchronize()  # and behind nothing else
        assert next_address(arena, taker)
        assert not taker.query(), "now behind the recorded stream's work, too"
    for stream in streams:
        stream.synchronize()
    pin.close()


@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_memory_stays_its_streams_own_if_the_wait_for_it_is_refused(
    make_arena, streams, driver, virtual_clock, backing
):
    config = {"stream_reuse": "wait", "backing": backing, "max_mem": 32 * MIB, "oom_wait_ms": 0}
    arena = make_arena(config | {"split_rule": "tight"})
    buffers = [arena.allocate(12 * MIB, stream) for stream in streams[:2]]
    places = {buffer.ptr for buffer in buffers}
    with driver.block(streams[0]), driver.block(streams[1]):
        for buffer in buffers:
            buffer.close()
        virtual_clock.fail(WAIT, 1, 1, 1000)
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(12 * MIB, streams[2])
        virtual_clock.clear_faults()
        assert streams[2].query()
        arena.check_invariants()
        assert {stream for _, stream in owners(arena)} >= {streams[0].ptr, streams[1].ptr}
        again = [arena.allocate(12 * MIB, stream) for stream in streams[:2]]
        assert {buffer.ptr for buffer in again} == places
        for buffer in again:
            buffer.close()
    for stream in streams:
        stream.synchronize()


@pytest.mark.parametrize("nbytes", [300 * KIB, 200 * KIB])
def test_smallest_pending_block_that_fits_is_taken_behind_a_wait(
    make_arena, streams, driver, nbytes
):
    arena = make_arena({"stream_reuse": "wait", "max_mem": MIB, "backing": "regions"})
    sizes = [400 * KIB, 300 * KIB, 100 * KIB, 224 * KIB]
    held = [arena.allocate(size, streams[0]) for size in sizes]
    address = held[1].ptr
    with driver.block(streams[1]):
        for buffer in held[:3]:
            buffer.record_stream(streams[1])
            buffer.close()
        taken = arena.allocate(nbytes, streams[2])
        assert taken.ptr == address
    for stream in streams:
        stream.synchronize()
    taken.close()
    held[3].close()


def test_pending_persistent_block_is_not_taken(make_arena, streams, driver):
    arena = make_arena({"stream_reuse": "wait", "max_mem": MIB, "backing": "regions"})
    buffer = arena.allocate_persistent(MIB)
    buffer.record_stream(streams[1])
    with driver.block(streams[1]):
        buffer.close()
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(MIB, streams[2])
    streams[1].synchronize()


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuEventCreate", RECORD, WAIT])
@pytest.mark.parametrize("policy", ["completed", "wait"])
def test_block_is_not_allocated_behind_a_call_that_failed(
    make_arena, streams, driver, virtual_clock, policy, call
):
    arena, pin = single_block_arena(make_arena, policy)
    buffer = arena.allocate(BLOCK, streams[0])
    with driver.block(streams[0]):
        buffer.close()
        virtual_clock.fail(call, 1, 1, 1000)
        assert next_address(arena, streams[1]) is None
        virtual_clock.clear_faults()
        assert next_address(arena, streams[0])
    streams[0].synchronize()
    assert next_address(arena, streams[1]), "the next event covers the work"
    pin.close()


def test_no_call_for_an_event_leaves_a_context_behind(make_arena, streams, driver, virtual_clock):
    current = ctypes.c_uint64()
    look = driver._function("cuCtxGetCurrent")
    virtual_clock.set_lag(LAG)
    for policy in ("completed", "wait"):
        arena, pin = single_block_arena(make_arena, policy)
        for stream in streams:
            arena.allocate(BLOCK, streams[0]).close()
            next_address(arena, stream)
            virtual_clock.advance_clock(LAG)
        pin.close()
        virtual_clock.set_lag(0)
        arena.close()
        assert look(ctypes.byref(current)) == 0
        assert current.value == 0


# ---- slots ---------------------------------------------------------------------------------------


def test_slots_are_looked_through_from_the_32nd_and_then_at_twice_those_in_use(make_arena, host):
    arena = make_arena()
    for _ in range(100):
        arena.allocate(KIB, gpumem.Stream("host")).close()
    assert stream_slots(arena) == 31
    arena = make_arena()
    held = [arena.allocate(KIB, gpumem.Stream("host")) for _ in range(40)]
    for _ in range(100):
        arena.allocate(KIB, gpumem.Stream("host")).close()
    # 42 are in use: those, the default stream's, and slot 0.
    assert stream_slots(arena) == 2 * 42 - 1
    held.clear()


def test_slot_of_a_recorded_stream_is_vacated_after_its_uses(streams, arena):
    for i, stream in enumerate(streams):
        for _ in range(3):
            buffer = arena.allocate(MIB)
            buffer.record_stream(stream)
            buffer.close()
        stream.synchronize()
        arena.allocate(32 * MIB).close()
        arena.reset_stream(stream)
        assert stream_slots(arena) == 2, i


@pytest.mark.parametrize("reuse", POLICIES)
def test_reset_of_a_stream_in_use_keeps_its_slot_for_it_alone(make_arena, reuse):
    arena = make_arena({"stream_reuse": reuse})
    held = [arena.allocate(nbytes, RAW) for nbytes in (KIB, MIB, 32 * MIB)]
    while held:
        arena.reset_stream(RAW)
        arena.allocate(KIB, RAW + 1).close()
        arena.reset_stream(RAW + 1)
        assert stream_slots(arena) == 3
        held.pop().close()
    arena.reset_stream(RAW)
    for handle in (RAW + 1, RAW + 2):
        arena.allocate(KIB, handle).close()
    assert stream_slots(arena) == 3
    for handle in (RAW + 1, RAW + 2):
        arena.reset_stream(handle)


@pytest.mark.parametrize("when", ["live", "pending"])
def test_recorded_stream_keeps_its_slot_while_others_come_and_go(make_arena, streams, driver, when):
    owner, side = streams[:2]
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    with driver.block(side):
        if when == "pending":
            buffer.close()
        for handle in range(RAW, RAW + 200):
            pin.record_stream(handle)
            arena.reset_stream(handle)
        buffer.close()
        assert next_address(arena, owner) is None
    side.synchronize()
    assert next_address(arena, owner)
    pin.close()


def test_recorded_uses_of_a_passed_through_block_end_with_its_free(make_arena):
    arena = make_arena({"enable": False})
    for handle in range(RAW, RAW + 10):
        buffer = arena.allocate(KIB)
        buffer.record_stream(handle)
        buffer.close()
        arena.reset_stream(handle)
    assert stream_slots(arena) <= 2

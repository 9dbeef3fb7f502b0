"""Blocks that several streams use, and frees on another stream than the block's own."""

import gc

import numpy as np
import pytest
from helpers.dlpack import consume
from helpers.driver import HostDriver
from helpers.single_block import BLOCK, MIB, can_have_it, next_address, single_block_arena
from helpers.threads import in_a_thread

import gpumem

KIB = 1 << 10
LAG = 1_000_000  # ns
POLICIES = ["completed", "wait", "never"]


@pytest.fixture
def driver(virtual_clock):
    return HostDriver()


def drop(buffer, view):
    del view
    buffer.close()


def drop_view_last(buffer, view):
    buffer.close()
    del view
    gc.collect()


ENDS = [drop, drop_view_last]


# ---- record_stream -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["completed", "never"])
@pytest.mark.parametrize("end", ENDS)
def test_block_is_not_reused_while_a_recorded_stream_uses_it(
    make_arena, streams, driver, policy, end
):
    owner, side, third = streams
    arena, pin = single_block_arena(make_arena, policy)
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    with driver.block(side):
        driver.fill(buffer, 1, side)
        end(buffer, np.from_dlpack(buffer))
        del buffer
        for taker in (owner, side, third, None):
            assert not can_have_it(arena, taker)
        assert arena.stats().in_use == 256
        assert arena.stats().reserved == MIB
        arena.check_invariants()
    side.synchronize()
    assert can_have_it(arena, owner)
    pin.close()


def test_dropped_block_waits_for_its_recorded_stream(make_arena, streams, driver):
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, streams[0])
    buffer.record_stream(streams[1])
    with driver.block(streams[1]):
        del buffer
        assert not can_have_it(arena, streams[0])
    streams[1].synchronize()
    assert can_have_it(arena, streams[0])
    pin.close()


def test_wait_policy_waits_on_the_device_for_every_stream_of_the_block(make_arena, streams, driver):
    owner, side, taker = streams
    arena, pin = single_block_arena(make_arena, "wait")
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    gates = [driver.block(owner), driver.block(side)]
    driver.fill(buffer, 1, owner)
    driver.fill(buffer, 2, side)
    buffer.close()
    buffer = arena.allocate(BLOCK, taker)
    driver.fill(buffer, 3, taker)
    gates[0].open()
    owner.synchronize()
    assert not taker.query(), "it waits for the recorded stream as well"
    gates[1].open()
    taker.synchronize()
    assert set(memoryview(buffer)) == {3}
    buffer.close()
    arena.check_invariants()
    pin.close()


def test_wait_policy_makes_the_own_stream_wait_for_a_recorded_one(make_arena, streams, driver):
    owner, side, _ = streams
    arena, pin = single_block_arena(make_arena, "wait")
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    with driver.block(side):
        driver.fill(buffer, 2, side)
        buffer.close()
        buffer = arena.allocate(BLOCK, owner)
        driver.fill(buffer, 3, owner)
        assert not owner.query()
    owner.synchronize()
    side.synchronize()
    assert set(memoryview(buffer)) == {3}
    buffer.close()
    pin.close()


@pytest.mark.parametrize("where", ["another thread", "a callback of a stream"])
def test_recorded_stream_delays_reuse_wherever_the_last_view_ends(
    make_arena, streams, driver, where
):
    owner, side, third = streams
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, owner)
    address, taken = buffer.ptr, consume(buffer.__dlpack__(max_version=(1, 0)))
    buffer.record_stream(side)
    buffer.close()
    with driver.block(side):
        if where == "another thread":
            in_a_thread(taken.delete)
        else:
            taken.delete_on(driver, third)
            third.synchronize()
        assert arena.stats().in_use == 256
        assert next_address(arena, owner) is None
    side.synchronize()
    assert next_address(arena, owner) == address
    pin.close()


@pytest.mark.parametrize("reader", [np.asarray, np.from_dlpack, memoryview])
def test_view_that_outlives_its_buffer_keeps_block_and_recorded_streams(
    make_arena, streams, driver, reader
):
    owner, side, _ = streams
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, owner)
    address, view = buffer.ptr, reader(buffer)
    with driver.block(side):
        driver.fill(buffer, 1, side)
        buffer.record_stream(side)
        buffer.close(owner)
        assert arena.stats().in_use == MIB
        del view
        gc.collect()
        assert next_address(arena, owner) is None
    side.synchronize()
    assert next_address(arena, owner) == address
    pin.close()


def test_work_queued_between_record_and_free_delays_reuse(make_arena, streams, driver):
    owner, side, _ = streams
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    side.synchronize()
    with driver.block(side):
        driver.fill(buffer, 1, side)
        buffer.close()
        assert not can_have_it(arena, owner)
    side.synchronize()
    assert can_have_it(arena, owner)
    pin.close()


def test_work_queued_after_the_free_does_not_delay_reuse(make_arena, streams, virtual_clock):
    owner, side, _ = streams
    arena, pin = single_block_arena(make_arena)
    virtual_clock.set_lag(LAG)
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    buffer.close()
    assert not can_have_it(arena, owner)  # the event is recorded here
    HostDriver().block(side).open()
    virtual_clock.advance_clock(LAG)
    assert can_have_it(arena, owner)
    pin.close()


def test_reuse_waits_for_all_recorded_streams(make_arena, streams, driver):
    owner, first, second = streams
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, owner)
    for stream in (first, second, first):
        buffer.record_stream(stream)
    gates = [driver.block(first), driver.block(second)]
    buffer.close()
    for gate, stream in zip(gates, (first, second), strict=True):
        assert not can_have_it(arena, owner)
        gate.open()
        stream.synchronize()
    assert can_have_it(arena, owner)
    pin.close()


def test_recording_the_own_stream_changes_nothing(make_arena, streams, host):
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, streams[0])
    buffer.record_stream(streams[0])
    calls = host.call_count()
    buffer.close()
    assert can_have_it(arena, streams[0])
    assert host.call_count() == calls
    pin.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_own_stream_delays_reuse_when_another_stream_frees(make_arena, streams, driver, policy):
    own, other, _ = streams
    arena, pin = single_block_arena(make_arena, policy)
    block = arena.allocate(BLOCK, own)
    with driver.block(own):
        block.record_stream(own)
        block.close(other)
        assert not can_have_it(arena, other) or not other.query()
    own.synchronize()
    assert can_have_it(arena, other)
    pin.close()


def test_free_of_a_recorded_block_calls_no_driver(streams, host, arena):
    for nbytes in (KIB, MIB):
        buffers = [arena.allocate(nbytes, streams[0]) for _ in range(3)]
        for buffer in buffers:
            buffer.record_stream(streams[1])
        view = memoryview(buffers[2])
        calls = host.call_count()
        buffers[0].close()
        buffers[1].close(streams[2])
        buffers.clear()
        view.release()
        assert host.call_count() == calls


def test_record_stream_on_a_closed_or_empty_buffer(arena, streams):
    buffer = arena.allocate(KIB)
    buffer.close()
    with pytest.raises(gpumem.errors.ClosedError):
        buffer.record_stream(streams[0])
    empty = arena.allocate(0)
    empty.record_stream(streams[0])
    with pytest.raises(TypeError, match="is not a stream"):
        empty.record_stream(object())
    empty.close()


def test_record_stream_rejects_a_stream_of_another_device(arena):
    class Sly:
        def __cuda_stream__(self):
            buffer.close()
            return 0, 12345

    buffer = arena.allocate(KIB)
    with pytest.raises(gpumem.errors.ClosedError):
        buffer.record_stream(Sly())


def test_block_may_be_freed_on_a_recorded_stream(make_arena, streams, driver):
    owner, side, _ = streams
    arena, pin = single_block_arena(make_arena)
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    with driver.block(side):
        buffer.close(side)
        assert not can_have_it(arena, owner)
        assert can_have_it(arena, side), "it orders itself"
    side.synchronize()
    pin.close()


def test_shrink_reports_blocks_in_use_by_other_streams(make_arena, streams, driver):
    arena = make_arena({"backing": "regions", "split_rule": "tight"})
    buffer = arena.allocate(MIB, streams[0])
    buffer.record_stream(streams[1])
    with driver.block(streams[1]):
        buffer.close()
        (kept,) = arena.shrink().retained
        assert "1 block of 1.0 MiB that other streams still use" in kept.reason
        assert [(block.used, block.pending_free) for block in kept.blocks] == [(False, True)]
        assert [block.pending_free for block in arena.blocks()] == [True]
    streams[1].synchronize()
    assert arena.shrink().released_bytes == MIB


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_of_the_recorded_stream_ends_the_wait(make_arena, streams, virtual_clock, policy):
    owner, side, _ = streams
    arena, pin = single_block_arena(make_arena, policy)
    virtual_clock.set_lag(LAG)
    buffer = arena.allocate(BLOCK, owner)
    buffer.record_stream(side)
    buffer.close()
    arena.reset_stream(side)  # lag only: nothing is queued
    assert can_have_it(arena, owner)
    pin.close()


def test_default_stream_that_is_a_raw_handle_is_named_again_by_a_call_that_names_none(
    make_arena, streams, driver
):
    settings = {"max_mem": MIB, "split_rule": "tight", "oom_wait_ms": 0}
    arena = make_arena(settings, default_stream=int(streams[0].ptr))
    pin = arena.allocate(256)
    arena.reset_stream(None)
    buffer = arena.allocate(BLOCK, streams[1])
    with driver.block(streams[0]):
        driver.fill(buffer, 1, streams[0])
        buffer.record_stream(None)
        buffer.close()
        assert not can_have_it(arena, streams[1])
    streams[0].synchronize()
    assert can_have_it(arena, streams[1])
    arena.allocate(BLOCK).close()
    streams[0].synchronize()
    assert can_have_it(arena, streams[1])
    pin.close()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_arena_closes_with_blocks_pending_free(host, streams, backing):
    used = host.used(0)
    arena = gpumem.Arena("host", {"backing": backing})
    buffer = arena.allocate(MIB, streams[0])
    buffer.record_stream(streams[1])
    host.set_lag(20_000_000)
    HostDriver().fill(buffer, 1, streams[1])
    buffer.close()
    arena.close()
    assert host.used(0) == used


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_dropped_arena_frees_blocks_pending_free(host, streams, backing):
    used = host.used(0)
    arena = gpumem.Arena("host", {"backing": backing})
    buffer = arena.allocate(MIB, streams[0])
    buffer.record_stream(streams[1])
    buffer.close()
    del arena, buffer
    gpumem.Arena("host").close()  # reaps
    assert host.used(0) == used


def test_persistent_and_passed_through_blocks_can_be_recorded(make_arena, streams, host):
    used = host.used(0)
    for config in ({}, {"enable": False}):
        arena = make_arena(config)
        buffer = arena.allocate_persistent(MIB)
        buffer.record_stream(streams[1])
        buffer.close()
        arena.shrink()
        arena.check_invariants()
        assert host.used(0) == used


def test_recorded_stream_is_kept_alive_until_the_block_is_done(arena, host):
    stream = gpumem.Stream("host")
    buffer = arena.allocate(MIB)
    buffer.record_stream(stream)
    destroyed = host.call_count("cuStreamDestroy")
    arena.reset_stream(stream)
    del stream
    assert host.call_count("cuStreamDestroy") == destroyed
    buffer.close()
    arena.allocate(MIB).close()
    assert host.call_count("cuStreamDestroy") == destroyed


def test_recorded_blocks_hold_their_bytes_under_random_work(make_arena, rng, host):
    """Three streams with real lag write and read each block; each byte has one owner at a time."""
    host.set_lag(200_000)
    driver = HostDriver()
    for policy in POLICIES:
        arena = make_arena({"stream_reuse": policy, "max_mem": 8 * MIB})
        streams = [gpumem.Stream("host") for _ in range(3)]
        live, failed = [], 0
        for step in range(400):
            owner, side = rng.sample(streams, 2)
            try:
                buffer = arena.allocate(rng.randrange(1, 700 * KIB), owner)
            except gpumem.OutOfMemoryError:
                failed += 1
                while live:
                    check(live.pop())
                for stream in streams:
                    stream.synchronize()
                    arena.reset_stream(stream)
                continue
            driver.fill(buffer, 255, owner)
            side.wait(owner.record())
            driver.fill(buffer, step % 251, side)
            buffer.record_stream(side)
            live.append((buffer, step % 251, side))
            if len(live) > 3:
                check(live.pop(rng.randrange(len(live))), wait=rng.random() < 0.5)
            if step % 50 == 0:
                arena.check_invariants()
        while live:
            check(live.pop())
        assert failed < 200


def check(block, wait=True):
    """Look at the bytes while they are ours, then free; or free with the work still queued."""
    buffer, value, side = block
    if wait:
        side.synchronize()
        assert set(memoryview(buffer)) == {value}
    buffer.close()


# ---- a driver's pool -----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_pool_free_waits_on_the_device_for_recorded_streams(streams, driver, end):
    owner, side, _ = streams
    with gpumem.DriverPool("host") as pool:
        buffer = pool.allocate(MIB, owner)
        buffer.record_stream(side)
        with driver.block(side):
            end(buffer, np.from_dlpack(buffer))
            assert not owner.query(), "the free is queued behind the recorded stream"
        owner.synchronize()
        side.synchronize()


# ---- close(stream=) ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("view", [False, True])
def test_block_freed_elsewhere_belongs_to_the_freeing_stream(
    make_arena, streams, driver, policy, view
):
    """With the mark of its own stream, or none, `owner` would overwrite what `side` still reads."""
    owner, side, third = streams
    arena, pin = single_block_arena(make_arena, policy)
    out = gpumem.Arena("host").allocate(BLOCK, side)
    buffer = arena.allocate(BLOCK, owner)
    driver.fill(buffer, 1, owner)
    side.wait(owner.record())
    gate = driver.block(side)
    driver.call("cuMemcpyDtoDAsync", out.ptr, buffer.ptr, BLOCK, side.ptr)
    held = memoryview(buffer) if view else None
    buffer.close(side)
    if view:
        held.release()
    for taker in (owner, third):
        try:
            other = arena.allocate(BLOCK, taker)
        except gpumem.OutOfMemoryError:
            continue
        driver.fill(other, 2, taker)
        other.close()
    gate.open()
    for stream in streams:
        stream.synchronize()
    assert set(memoryview(out)) == {1}
    out.close()
    pin.close()

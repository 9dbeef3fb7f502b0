"""Streams that are reset, destroyed and made anew: no mark outlives its stream, no slot is lost."""

import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.threads import in_a_thread

import gpumem
from gpumem._testing.arenas import stream_slots

KIB, MIB = 1 << 10, 1 << 20
BLOCK = MIB - 256
POLICIES = ["completed", "wait", "never"]
RAW = 0x7000_0000_0000  # handles that no driver gave out: whoever calls it with one is caught


def marks(arena):
    return {block.stream for block in arena.blocks()}


# ---- slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_hundred_thousand_streams_in_turn_use_few_slots(make_arena, policy):
    arena = make_arena({"stream_reuse": policy})
    for handle in range(RAW, RAW + 100_000):
        arena.allocate(KIB, handle).close()
        arena.reset_stream(handle)
    assert stream_slots(arena) <= 2
    assert marks(arena) == {0}


def test_error_of_too_many_streams_names_the_limit():
    # Recorded, they keep their slots without memory of their own. Their end would ask the driver.
    child.run_quietly("""
        import os
        import gpumem

        arena = gpumem.Arena("host", name="wide")
        buffers = [arena.allocate(256) for _ in range(66)]
        try:
            for i in range(65_536):
                buffers[i // 1000].record_stream(0x7000_0000_0000 + i)
        except MemoryError as error:
            text = str(error)
        assert i == 65_534, i
        assert "'wide'" in text and "65,535 streams, the most" in text, text
        assert "reset_stream()" in text, text
        arena.allocate(256).close()
        os._exit(0)
        """)


def test_streams_dropped_without_a_reset_free_their_slots(host, arena):
    destroyed = host.call_count("cuStreamDestroy")
    for _ in range(500):
        arena.allocate(KIB, gpumem.Stream("host")).close()
    assert stream_slots(arena) <= 64
    assert host.call_count("cuStreamDestroy") - destroyed >= 400


def test_streams_free_their_slots_once_other_streams_have_their_memory(arena):
    """No memory is marked with them, only their last free has no event behind it."""
    for _ in range(500):
        stream = gpumem.Stream("host")
        arena.allocate(MIB, stream).close()
        arena.allocate(MIB, stream).close(gpumem.Stream.from_handle("host", 0))
    assert stream_slots(arena) <= 64


def test_streams_with_live_or_pending_blocks_keep_their_slots(make_arena, virtual_clock):
    arena = make_arena({"stream_reuse": "completed"})
    virtual_clock.set_lag(1000)
    streams = [gpumem.Stream("host") for _ in range(100)]
    live = [arena.allocate(KIB, stream) for stream in streams[:50]]
    for stream in streams[50:]:
        arena.allocate(KIB, stream).close()
    assert [buffer.stream for buffer in live] == streams[:50]
    assert marks(arena) >= {stream.ptr for stream in streams}
    virtual_clock.advance_clock(1000)
    for buffer in live:
        buffer.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_ended_threads_leave_no_stream_slots(make_arena, policy):
    arena = make_arena({"stream_reuse": policy}, default_stream=2)
    for _ in range(200):
        in_a_thread(lambda: arena.allocate(MIB).close())
    if policy != "never":
        assert stream_slots(arena) <= 64
        assert arena.stats().reserved <= 64 * MIB


def test_new_thread_never_gets_blocks_of_an_ended_threads_stream(make_arena):
    arena = make_arena({"stream_reuse": "never"}, default_stream=2)
    seen = []

    def take():
        with arena.allocate(MIB) as buffer:
            seen.append(buffer.ptr)

    for _ in range(20):
        in_a_thread(take)
    assert len(set(seen)) == len(seen)


def test_reused_stream_slot_has_no_blocks_of_the_previous_stream(make_arena, virtual_clock):
    """The second stream's work must not count as the first one's, nor the other way round."""
    arena = make_arena({"max_mem": MIB, "split_rule": "tight", "oom_wait_ms": 0})
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    pin = arena.allocate(256)
    arena.allocate(BLOCK, first).close()
    first.synchronize()
    arena.reset_stream(first)
    slots = stream_slots(arena)
    virtual_clock.set_lag(1000)
    arena.allocate(BLOCK, second).close()
    assert stream_slots(arena) == slots
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(BLOCK, first)
    virtual_clock.advance_clock(1000)
    arena.allocate(BLOCK, first).close()
    pin.close()


def test_stream_of_a_shareable_block_cannot_be_vacated_while_the_arguments_are_read(
    make_arena, monkeypatch
):
    arena, (stream, other) = make_arena(), (gpumem.Stream("host") for _ in range(2))
    capabilities = type(gpumem.Device("host").capabilities)
    read = capabilities.__getitem__

    def reset_by_another_thread():
        arena.reset_stream(stream.ptr)
        arena.allocate(KIB, other.ptr).close()

    def read_and_reset(self, name):
        monkeypatch.setattr(capabilities, "__getitem__", read)
        in_a_thread(reset_by_another_thread)
        return read(self, name)

    monkeypatch.setattr(capabilities, "__getitem__", read_and_reset)
    with arena.allocate(KIB, stream.ptr, shareable=True) as buffer:
        assert buffer.stream.ptr == stream.ptr


# ---- resets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_clears_every_mark_after_splits_and_takeovers(make_arena, policy, virtual_clock):
    arena = make_arena({"stream_reuse": policy, "split_rule": "tight"})
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    virtual_clock.set_lag(1000)
    held = [arena.allocate(300 * KIB, first) for _ in range(3)]
    held.clear()
    held = [arena.allocate(100 * KIB, first), arena.allocate(200 * KIB, second)]
    arena.reset_stream(first)
    free = {block.stream for block in arena.blocks() if not block.used}
    assert first.ptr not in free
    assert {block.stream for block in arena.blocks() if block.used} == {first.ptr, second.ptr}
    held.clear()
    for stream in (first, second):
        arena.reset_stream(stream)
    assert marks(arena) == {0}


def test_raw_handle_is_not_used_after_its_reset(make_arena, host):
    """Its owner destroys the stream while a block is alive that will be freed on it."""
    arena = make_arena({"max_mem": MIB, "split_rule": "tight", "oom_wait_ms": 0})
    stream, other = gpumem.Stream("host"), gpumem.Stream("host")
    handle = int(stream.ptr)
    pin, buffer = arena.allocate(256, other), arena.allocate(BLOCK, handle)
    stream.synchronize()
    arena.reset_stream(handle)
    del stream
    buffer.close()
    records = host.call_count("cuEventRecord")
    for _ in range(3):
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(BLOCK, other)
    assert host.call_count("cuEventRecord") == records
    arena.reset_stream(handle)
    arena.allocate(BLOCK, other).close()
    pin.close()


def test_dropped_arena_does_not_ask_a_raw_handle_that_was_reset(host):
    arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
    handle = int(stream.ptr)
    buffer = arena.allocate(BLOCK, handle)
    stream.synchronize()
    arena.reset_stream(handle)
    del stream
    buffer.close()
    asked = host.call_count("cuStreamGetCaptureInfo")  # before anything else is asked of a stream
    del arena, buffer
    assert host.call_count("cuStreamGetCaptureInfo") == asked


def test_new_stream_with_the_same_handle_inherits_no_pending_work(make_arena, virtual_clock):
    arena = make_arena({"stream_reuse": "never"})
    stream = gpumem.Stream("host")
    arena.allocate(MIB, int(stream.ptr)).close()
    arena.reset_stream(int(stream.ptr))
    assert marks(arena) == {0}
    again = arena.allocate(MIB, gpumem.Stream.from_handle("host", stream.ptr))
    assert again.stream.ptr == stream.ptr
    again.close()


def test_recorded_use_of_a_raw_handle_ends_with_its_reset(make_arena, host):
    arena = make_arena({"max_mem": MIB})
    stream = gpumem.Stream("host")
    buffer = arena.allocate(MIB)
    buffer.record_stream(int(stream.ptr))
    arena.reset_stream(int(stream.ptr))
    del stream
    buffer.close()
    arena.allocate(MIB).close()


def test_stream_object_is_kept_alive_by_its_block(arena, host):
    stream = gpumem.Stream("host")
    driver, handle = HostDriver(), stream.ptr
    buffer = arena.allocate(KIB, stream)
    driver.fill(buffer, 7, stream)
    destroyed = host.call_count("cuStreamDestroy")
    arena.reset_stream(stream)
    del stream
    assert host.call_count("cuStreamDestroy") == destroyed
    assert buffer.stream.ptr == handle
    buffer.stream.synchronize()
    assert set(memoryview(buffer)) == {7}


def test_arenas_default_stream_outlives_its_reset(make_arena, host):
    stream = gpumem.Stream("host")
    arena = make_arena(default_stream=stream)
    arena.allocate(KIB).close()
    destroyed = host.call_count("cuStreamDestroy")
    arena.reset_stream(None)
    del stream
    assert host.call_count("cuStreamDestroy") == destroyed
    assert arena.allocate(KIB).stream.query()

"""The debug heap through an arena's life: quarantine, memory out, suspend, capture, close."""

import ctypes
import gc
import threading
import warnings

import pytest
from helpers.driver import HostDriver
from helpers.graph import Graph
from helpers.heap import found_by, line_of, number_at_rest

import gpumem

KIB, MIB = 1 << 10, 1 << 20


def give_dropped_arenas_back():
    assert gpumem.Device("host").free_bytes > 0
    for _ in range(1000):  # between two of its steps the interpreter does what was left for it
        pass


# ---- the quarantine ------------------------------------------------------------------------------


def test_quarantined_block_is_not_reused(make_arena, memory):
    arena = make_arena(memory=memory, debug_heap={"quarantine_bytes": 64 * KIB})
    resting = []
    for _ in range(100):
        buffer = arena.allocate(4096)
        assert buffer.ptr not in resting[-14:]  # 4096 and two guards each
        resting.append(buffer.ptr)
        buffer.close()
        arena.check_heap()
    assert len(set(resting)) <= 20


def test_quarantine_is_bounded_by_allocated_bytes(make_arena):
    arena = make_arena(debug_heap={"quarantine_bytes": 64 * KIB})
    for _ in range(2000):
        arena.allocate(1).close()
    kept = [block for block in arena.blocks() if block.pending_free]
    assert 64 * KIB - 2048 < sum(block.allocated_nbytes for block in kept) <= 64 * KIB + 2048


def test_without_a_quarantine_blocks_are_reused_at_once(make_arena, memory):
    arena = make_arena(memory=memory, debug_heap={"quarantine_bytes": 0})
    addresses = set()
    for _ in range(10):
        buffer = arena.allocate(4096)
        addresses.add(buffer.ptr)
        buffer.close()
        arena.check_heap()
    assert len(addresses) == 1


def test_block_larger_than_the_quarantine_evicts_nothing(make_arena):
    arena = make_arena(debug_heap={"quarantine_bytes": MIB})
    small = arena.allocate(1000)
    small.close()
    arena.check_heap()
    assert number_at_rest(arena) == 1
    arena.allocate(2 * MIB).close()
    arena.check_heap()
    assert number_at_rest(arena) == 1
    assert arena.stats().in_use == 0


def test_stats_leave_out_quarantined_blocks(make_arena):
    arena = make_arena(debug_heap=True)
    buffers = [arena.allocate(1000) for _ in range(3)]
    buffers.pop().close()
    stats = arena.stats()
    assert stats.requested_in_use == 2000
    assert (stats.num_allocs, stats.num_frees) == (3, 1)
    arena.check_heap()
    assert arena.stats().in_use == stats.in_use
    for buffer in buffers:
        buffer.close()
    assert arena.stats().in_use == arena.stats().requested_in_use == 0


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_quarantine_is_released_before_out_of_memory(make_arena, backing):
    arena = make_arena({"max_mem": 4 * MIB, "backing": backing}, debug_heap=True)
    for _ in range(20):
        arena.allocate(3 * MIB).close()
    assert arena.check_heap() == ()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(4 * MIB)  # with guards it is too large
    arena.allocate(3 * MIB).close()


def test_quarantine_with_unfinished_work_is_waited_for(make_arena, host, driver, streams):
    arena = make_arena({"max_mem": 4 * MIB, "oom_wait_ms": 60_000}, debug_heap=True)
    host.set_lag(20_000_000)
    for _ in range(3):
        buffer = arena.allocate(3 * MIB, streams[0])
        driver.fill(buffer, 1, streams[0])
        buffer.close()
    assert arena.check_heap() == ()


def test_other_threads_allocate_while_one_waits(make_arena, streams, driver):
    arena = make_arena({"max_mem": 4 * MIB, "oom_wait_ms": 60_000}, debug_heap=True)
    buffer, got = arena.allocate(3 * MIB, streams[0]), []
    with driver.block(streams[0]):
        buffer.close()
        waits = threading.Thread(target=lambda: got.append(arena.allocate(3 * MIB, streams[1])))
        waits.start()
        for _ in range(20):
            arena.allocate(1000, streams[2]).close()
            assert arena.check_heap(wait=False) == ()
        assert got == []
    waits.join()
    assert got.pop().nbytes == 3 * MIB


def test_reset_stream_releases_its_quarantined_blocks(make_arena, streams):
    arena = make_arena(debug_heap={"quarantine_bytes": 0})
    buffer = arena.allocate(5000, streams[0])
    address = buffer.ptr
    streams[0].synchronize()
    buffer.close()
    arena.reset_stream(streams[0])
    again = arena.allocate(5000, streams[1])
    assert again.ptr == address
    again.close()


def test_out_of_memory_leaves_the_debug_heap_unchanged(make_arena, streams, driver, memory):
    arena = make_arena({"max_mem": 4 * MIB, "oom_wait_ms": 0}, memory=memory, debug_heap=True)
    buffer = arena.allocate(3 * MIB, streams[0])
    with driver.block(streams[0]):
        buffer.close()
        before = arena.stats()
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(3 * MIB)
        assert arena.stats().in_use == before.in_use
    streams[0].synchronize()
    arena.allocate(3 * MIB).close()
    assert arena.outstanding() == []


def test_shrink_releases_the_quarantine(make_arena, memory):
    arena = make_arena(memory=memory, debug_heap=True)
    for _ in range(8):
        arena.allocate(MIB).close()
    arena.check_heap()
    report = arena.shrink()
    assert report.released_bytes >= 8 * MIB
    assert report.retained == ()
    assert arena.stats().reserved == 0


def test_shrink_reports_faults(make_arena, write):
    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(MIB)
    address = buffer.ptr
    buffer.close()
    arena.check_heap()
    write(address)
    assert found_by(arena.shrink)[0].kind == "use_after_free"


# ---- suspend -------------------------------------------------------------------------------------


def test_suspend_and_resume_keep_guards_and_defer_frees(make_arena, write):
    arena = make_arena(debug_heap=True)
    kept, dropped, rested = (arena.allocate(MIB) for _ in range(3))
    memoryview(kept)[:4] = b"here"
    rested.close()
    arena.sleep()
    assert arena.check_heap() == ()  # there is nothing to look at
    dropped.close()
    with pytest.raises(gpumem.errors.AsleepError):
        arena.allocate(1)
    arena.wake()
    assert arena.check_heap() == ()
    assert bytes(memoryview(kept)[:4]) == b"here"
    write(kept.ptr + MIB)
    assert found_by(arena.check_heap)[0].kind == "overrun"
    kept.close()


def test_suspended_arena_with_deferred_frees_closes():
    for end in ("close", "drop"):
        arena = gpumem.Arena("host", debug_heap=True)
        buffer = arena.allocate(MIB)
        arena.sleep()
        buffer.close()
        del buffer
        if end == "close":
            arena.close()
        del arena
        gc.collect()
        give_dropped_arenas_back()


# ---- graphs --------------------------------------------------------------------------------------


def test_graph_pool_blocks_have_no_guards(make_arena, streams):
    arena, stream = make_arena(debug_heap=True), streams[0]
    with arena.capture(stream) as pool:
        buffer = arena.allocate(4096, stream)
        assert pool.stats().in_use == 4096
    assert arena.outstanding() == []
    buffer.close()
    pool.close()


def test_other_threads_allocate_while_a_stream_captures(make_arena, memory, streams, driver):
    arena, stream = make_arena(memory=memory, debug_heap=True), streams[0]
    buffer = arena.allocate(4096, stream)
    with Graph(driver, stream) as graph:
        buffer.close()
        other = arena.allocate(4096, streams[1])
        other.close()
        arena.check_heap(wait=False)
    graph.destroy()
    assert arena.check_heap() == ()


# ---- the end of an arena -------------------------------------------------------------------------


def test_refused_close_names_allocation_sites(make_arena):
    arena = make_arena(debug_heap=True)
    buffers = [arena.allocate(100) for _ in range(12)]  # still in use
    with pytest.raises(gpumem.errors.InUseError) as caught:
        arena.close()
    assert line_of("still in use") in str(caught.value)
    assert "and 2 more" in str(caught.value)
    assert [block.ptr for block in arena.outstanding()] == [buffer.ptr for buffer in buffers]
    for buffer in buffers:
        buffer.close()


def test_close_reports_faults_and_closes(write, memory):
    arena = gpumem.Arena(memory, debug_heap=True)
    buffer = arena.allocate(100)
    write(buffer.ptr + 100)
    buffer.close()
    assert found_by(arena.close)[0].kind == "overrun"
    assert arena.closed
    arena.close()


def test_faults_of_a_dropped_arena_are_warnings(write):
    arena = gpumem.Arena("host", debug_heap=True)
    buffer = arena.allocate(100)
    write(buffer.ptr + 100)
    del buffer, arena
    gc.collect()
    with pytest.warns(gpumem.errors.HeapWarning, match="overrun"):
        give_dropped_arenas_back()


# ---- who is told ---------------------------------------------------------------------------------


def test_warn_mode_warns_for_each_report(make_arena, write):
    arena = make_arena(debug_heap={"on_error": "warn"})
    buffer = arena.allocate(100)
    write(buffer.ptr + 100)
    with pytest.warns(gpumem.errors.HeapWarning, match="overrun") as caught:
        (report,) = arena.check_heap()
    assert len(caught) == 1
    assert report.kind == "overrun"
    buffer.close()


def test_callback_receives_each_report_and_may_call_the_arena(make_arena, write):
    told = []

    def tell(report):
        arena.check_heap()
        told.append(report.kind)

    arena = make_arena(debug_heap={"on_error": tell})
    buffer = arena.allocate(100)
    write(buffer.ptr + 100)
    write(buffer.ptr - 1)
    arena.check_heap()
    assert sorted(told) == ["overrun", "underrun"]
    buffer.close()


def test_callbacks_exception_is_raised_after_all_reports(make_arena, write):
    told = []

    def tell(report):
        told.append(report)
        raise RuntimeError("told")

    arena = make_arena(debug_heap={"on_error": tell})
    buffer = arena.allocate(100)
    write(buffer.ptr + 100)
    write(buffer.ptr - 1)
    with pytest.raises(RuntimeError, match="told"):
        arena.check_heap()
    assert len(told) == 2
    buffer.close()


def test_raising_allocation_takes_no_memory(make_arena, write):
    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(100)
    write(buffer.ptr + 100)
    buffer.close()
    found_by(lambda: arena.allocate(100))
    assert arena.outstanding() == []
    assert arena.stats().num_allocs == 1
    arena.allocate(100).close()


# ---- the driver refuses --------------------------------------------------------------------------


def test_block_is_released_when_writing_its_guard_fails(make_arena, host, streams):
    arena = make_arena(memory="host/host_accessible", debug_heap=True)
    before = arena.stats().in_use
    host.fail("cuMemsetD8Async", 1, 999)
    with pytest.raises(gpumem.errors.DriverError, match="cuMemsetD8Async"):
        arena.allocate(100, streams[0])
    host.clear_faults()
    assert arena.outstanding() == []
    assert arena.stats().in_use == before
    arena.allocate(100).close()


def test_check_raises_when_reading_guards_fails(make_arena, host):
    arena = make_arena(memory="host/host_accessible", debug_heap=True)
    buffer = arena.allocate(100)
    host.fail("cuMemcpyDtoHAsync", 1, 999)
    with pytest.raises(gpumem.errors.DriverError):
        arena.check_heap()
    host.clear_faults()
    assert arena.check_heap() == ()
    buffer.close()


# ---- settings ------------------------------------------------------------------------------------


def test_shareable_blocks_are_zeroed_and_tracked_without_guards(make_arena):
    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(5000, shareable=True)
    assert bytes(buffer) == bytes(5000)
    assert [block.nbytes for block in arena.outstanding()] == [5000]
    buffer.close()
    arena.check_heap()
    assert arena.stats().in_use == 0


def test_check_without_a_debug_heap_names_the_setting(make_arena):
    arena = make_arena(debug_heap=False)
    assert arena.debug_heap is None
    for call in (arena.check_heap, arena.outstanding):
        with pytest.raises(gpumem.ConfigError, match="debug_heap=True"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guard_bytes": 100}, "guard_bytes = 100: .* multiple of 256"),
        ({"guard_bytes": "100B"}, "guard_bytes = '100B': .* multiple of 256"),
        ({"guard_bytes": 2 << 20}, "guard_bytes"),
        ({"guard_byte": 256}, "guard_byte"),
        ({"fresh_byte": -1}, 'fresh_byte = -1: .* "none"'),
        ({"quarantine_bytes": -1}, "quarantine_bytes"),
        ({"stack_depth": "deep"}, "stack_depth"),
        ({"stack_every": 0}, "stack_every"),
        ({"on_error": "abort"}, "on_error = 'abort': .* \"warn\""),
        ({"colour": 1}, "unknown key 'colour'"),
    ],
)
def test_invalid_settings_are_refused_by_name_and_range(options, message):
    with pytest.raises(gpumem.ConfigError, match=message):
        gpumem.Arena("host", debug_heap=options)


def test_settings_without_effect_give_a_warning():
    with pytest.warns(gpumem.errors.ConfigWarning, match="stack_every = 5 .* stack_depth = 0"):
        gpumem.Arena("host", debug_heap={"stack_depth": 0, "stack_every": 5})
    for used in ({"stack_depth": 0}, {"stack_every": 5}):
        gpumem.Arena("host", debug_heap=used)


def test_guard_byte_fills_padding_where_there_are_no_guards(make_arena):
    buffer = make_arena(debug_heap={"guard_bytes": 0, "guard_byte": 0x22}).allocate(100)
    assert ctypes.string_at(buffer.ptr + 100, 156) == b"\x22" * 156


def test_without_a_quarantine_a_block_is_filled_while_its_own_stream_is_at_work(make_arena):
    arena = make_arena(debug_heap={"quarantine_bytes": 0, "freed_byte": 3})
    own, other = gpumem.Stream("host"), gpumem.Stream("host")
    buffer = arena.allocate(1000, own)
    address = buffer.ptr
    with HostDriver().block(own):
        buffer.close(other)
        arena.allocate(8).close()
        assert ctypes.string_at(address, 1000) == b"\x03" * 1000
    own.synchronize()


@pytest.mark.parametrize("debug", [1, "yes", [("guard_bytes", 256)], object()])
def test_settings_of_a_wrong_type_are_type_errors(debug):
    with pytest.raises(TypeError, match="debug_heap must be"):
        gpumem.Arena("host", debug_heap=debug)


@pytest.mark.parametrize(
    ("text", "guard"),
    [("1", 256), ("true", 256), ("guard_bytes=512,on_error=warn", 512), ("guard_bytes=1KiB", 1024)],
)
def test_environment_variable_sets_the_options(monkeypatch, make_arena, text, guard):
    monkeypatch.setenv("GPUMEM_DEBUG_HEAP", text)
    assert make_arena().debug_heap.guard_bytes == guard
    assert make_arena(debug_heap=False).debug_heap is None
    monkeypatch.setenv("GPUMEM_DEBUG_HEAP", "0")
    assert make_arena().debug_heap is None
    monkeypatch.setenv("GPUMEM_DEBUG_HEAP", "guard=1")
    with pytest.raises(gpumem.ConfigError, match="GPUMEM_DEBUG_HEAP"):
        gpumem.Arena("host")


def test_settings_round_trip_through_text():
    options = gpumem.debugging.DebugHeapOptions(fresh_byte=None, guard_bytes=512, leaks=False)
    assert gpumem.debugging.DebugHeapOptions.from_text(options.to_text()) == options
    with pytest.raises(gpumem.errors.ConfigError, match="on_error = <built-in function print>"):
        gpumem.debugging.DebugHeapOptions(on_error=print).to_text()


def test_report_survives_pickling(make_arena, write):
    import pickle

    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(100)
    write(buffer.ptr + 100)
    with pytest.raises(gpumem.errors.HeapCorruptionError) as caught:
        arena.check_heap()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again.reports[0]) == str(caught.value.reports[0])
    buffer.close()


def test_correct_program_gives_no_warning(make_arena):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena = make_arena(debug_heap={"on_error": "warn"})
        arena.allocate(100).close()
        arena.check_heap()

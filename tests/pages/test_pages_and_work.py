"""The virtual backing while work is queued: nothing moves, goes or exceeds a limit under it."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from helpers.driver import HostDriver
from helpers.threads import run_threads

import gpumem

MIB = 1 << 20
VIRTUAL = {"backing": "virtual"}


def open_soon(gate):
    timer = threading.Timer(0.1, gate.open)
    timer.start()
    return timer


def test_new_pages_leave_a_view_with_queued_work_alone(make_arena, stream):
    driver, other = HostDriver(), gpumem.Stream("host")
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0})
    first, second, kept = (arena.allocate(size * MIB, stream) for size in (4, 2, 4))
    second.close()
    behind = arena.allocate(4 * MIB, stream)  # on a new page and on the second block's
    stream.synchronize()
    arena.reset_stream(stream)
    with driver.block(stream):
        driver.fill(behind, 9, stream)
        behind.close()
        first.close()
        # Takes the second block's page back: the view that the fill writes through is a hole now.
        swapped = arena.allocate(6 * MIB, stream)
        assert arena.stats().reserved == 12 * MIB
        taken = arena.allocate(4 * MIB, other)
        memoryview(taken)[:] = bytes([5]) * taken.nbytes
    stream.synchronize()
    assert set(bytes(taken)) == {5}
    for buffer in (kept, swapped, taken):
        buffer.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_close_waits_for_queued_work_on_pages(stream, end, driver):
    arena = gpumem.Arena("host", VIRTUAL)
    buffer = arena.allocate(4 * MIB, stream)
    gate = driver.block(stream)
    driver.fill(buffer, 9, stream)
    buffer.close()
    timer = open_soon(gate)
    if end == "close":
        arena.close()
        assert arena.stats().reserved == 0
    else:
        del arena, buffer
        assert gpumem.Device("host").free_bytes > 0
    timer.join()
    stream.synchronize()  # raises if the fill found its memory gone


def test_pages_with_queued_work_count_towards_max_mem(make_arena, stream, driver):
    # Pages of two granules, as from a live peak of 896 MiB on: they do not fit a gap of one.
    arena = make_arena(VIRTUAL | {"page_move_threshold": 1000, "max_mem": 1000 * MIB})
    arena.allocate(960 * MIB, stream).close()
    arena.reset_stream(stream)
    arena.shrink()
    blocks = [arena.allocate(4 * MIB, stream) for _ in range(250)]
    with driver.block(stream):
        for block in blocks[::2]:
            block.close()
        with suppress(gpumem.OutOfMemoryError):
            while True:
                blocks.append(arena.allocate(6 * MIB, stream))
        assert arena.stats().max_reserved <= 1000 * MIB
        arena.check_invariants()
    stream.synchronize()
    blocks.pop().close()
    blocks.append(arena.allocate(4 * MIB, stream))  # the plan that was refused left nothing behind
    for block in blocks:
        block.close()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_close_while_other_threads_allocate_leaves_nothing(backing):
    failures = []

    def work(arena, start):
        start.wait()
        try:
            for size in range(40):
                arena.allocate((size % 7 + 1) << 19).close()
        except gpumem.errors.ClosedError:
            pass
        except Exception as error:
            failures.append(error)

    def close(arena, start):
        start.wait()
        while not arena.closed:
            with suppress(gpumem.errors.InUseError):
                arena.close()

    for _ in range(60):
        arena, start = gpumem.Arena("host", {"backing": backing}), threading.Barrier(3)
        run_threads(threading.Thread(target=t, args=(arena, start)) for t in (work, work, close))
        assert arena.stats().reserved == 0
    assert failures == []


def test_request_beyond_every_address_range_does_not_name_max_mem(make_arena):
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        make_arena(VIRTUAL).allocate(1 << 43)
    assert "max_mem" not in str(caught.value)


def test_shrink_names_the_stream_whose_work_retains_memory(make_arena, stream, driver):
    arena = make_arena(VIRTUAL)
    pin = arena.allocate(MIB)
    buffer = arena.allocate(4 * MIB, stream)
    with driver.block(stream):
        driver.fill(buffer, 9, stream)
        buffer.close()
        reasons = ", ".join(kept.reason for kept in arena.shrink().retained)
        assert f"free, for stream {stream.ptr:#x} whose work is not known to be done" in reasons
        assert "1 live block of 1.0 MiB" in reasons
        assert "0 live blocks" not in reasons
    stream.synchronize()
    pin.close()
    assert arena.shrink().retained == ()


def test_shrink_reports_nothing_as_freed_if_nothing_was(make_arena, stream):
    arena = make_arena(VIRTUAL)
    buffer = arena.allocate(1000, stream)
    with HostDriver().block(stream):
        (kept,) = arena.shrink().retained
    assert "freed" not in kept.reason
    rest = kept.allocated_nbytes - buffer.allocated_nbytes
    assert rest == 2 * MIB - 1024
    assert kept.reason == (
        f"1 live block of 1.0 KiB, 2.0 MiB free, for stream {stream.ptr:#x} whose work is not "
        "known to be done"
    )


def test_memory_beside_a_new_block_serves_other_streams_once_the_stream_has_passed(make_arena):
    # The rest of a new page is free, though nobody freed it.
    arena = make_arena(VIRTUAL)
    streams = [gpumem.Stream("host") for _ in range(50)]
    held = []
    for stream in streams:
        held.append(arena.allocate(4096, stream))
        stream.synchronize()
    assert arena.stats().reserved == 34 * MIB
    (kept, *_) = arena.shrink().retained
    assert "not known to be done" not in kept.reason


def test_memory_beside_a_new_block_is_withheld_while_its_stream_works(make_arena, stream):
    # A page that moved here may still be used by what was queued before.
    driver, other = HostDriver(), gpumem.Stream("host")
    arena = make_arena(VIRTUAL)
    with driver.block(stream):
        first = arena.allocate(4096, stream)
        second = arena.allocate(4096, other)
        assert abs(first.ptr - second.ptr) >= MIB
    stream.synchronize()
    arena.shrink()
    third = arena.allocate(4096, gpumem.Stream("host"))
    assert arena.stats().reserved == 4 * MIB
    del first, second, third


def events_recorded_for(arena, host, sizes):
    """Take blocks, each for a stream of its own; return the events recorded after each."""
    before, found, held = host.call_count("cuEventRecord"), [], []
    for size in sizes:
        held.append(arena.allocate(size, gpumem.Stream("host")))
        found.append(host.call_count("cuEventRecord") - before)
    while held:
        held.pop().close()
    return found


def test_memory_beside_new_blocks_is_shared_once_it_is_more_than_half(make_arena, host):
    arena = make_arena(VIRTUAL)
    pin = arena.allocate(22 * MIB)
    # The 24th block is half of 68 MiB, with all before it.
    events = events_recorded_for(arena, host, [MIB // 2] * 25)
    assert events == [0] * 24 + [24]
    pin.close()


@pytest.mark.parametrize(("more", "shared"), [(0, True), (256, False)])
def test_memory_beside_new_blocks_is_shared_from_32_mib_on(make_arena, host, more, shared):
    # Each of 19 pages has 1.75 MiB beside its block: with the last block, 32 MiB are left.
    sizes = [MIB // 4] * 19 + [MIB * 5 // 4 + more]
    events = events_recorded_for(make_arena(VIRTUAL), host, sizes)
    assert events == [0] * 19 + [19 if shared else 0]

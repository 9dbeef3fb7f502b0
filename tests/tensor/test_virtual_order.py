"""Rows of virtual tensors that queued work uses, while they are released: nothing waits."""

from __future__ import annotations

import random

import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.graph import RELAXED, Graph
from helpers.threads import in_threads, running
from helpers.waiting import without_waiting

import gpumem
from gpumem._testing.arenas import stream_slots
from gpumem.errors import OutOfMemoryError

MIB = 1 << 20


def cache_of(arena, rows=64, **settings):
    return arena.virtual((rows, MIB), "uint8", **{"step": 2} | settings)


def held_after(arena, cache, *streams):
    """Return the bytes that rows hold, once the work of these streams is done."""
    for stream in streams:
        stream.synchronize()
    arena.shrink()
    return cache.held_nbytes


def fill(cache, value, stream):
    """Queue a fill of the first row."""
    HostDriver().call("cuMemsetD8Async", cache.ptr, value, MIB, stream.ptr)


@pytest.mark.parametrize("own", [True, False])
def test_pages_leave_when_the_work_before_their_release_is_done(arena, own, stream):
    cache = cache_of(arena, committed=4, stream=stream if own else None)
    if not own:
        cache.record_stream(stream)
    with HostDriver().block(stream) as gate:
        fill(cache, 5, stream)
        with without_waiting(gate):
            cache.release(0, 4)
            assert cache.rows == ()
            assert (cache.held_nbytes, cache.used_nbytes) == (4 * MIB, 0)
            stats = arena.stats()
            assert (stats.in_use, stats.reserved) == (0, 4 * MIB)
            arena.shrink()
            assert cache.held_nbytes == 4 * MIB
    assert held_after(arena, cache, stream) == arena.stats().reserved == 0


def test_work_queued_after_the_release_does_not_hold_pages(arena, stream):
    cache = cache_of(arena, committed=4, stream=stream)
    fill(cache, 5, stream)
    cache.release(0, 4)
    stream.synchronize()
    with HostDriver().block(stream):
        arena.shrink()
        assert cache.held_nbytes == 0


def test_commit_takes_leaving_pages_back_as_they_are(arena, stream):
    cache = cache_of(arena, committed=4, stream=stream)
    with HostDriver().block(stream) as gate:
        fill(cache, 5, stream)
        cache.release(0, 4)
        calls = arena.stats().driver_calls
        with without_waiting(gate):
            cache.commit(2)
        assert cache.used_nbytes == 2 * MIB
        # Nothing was made or mapped: what came are questions about the events.
        assert arena.stats().driver_calls - calls <= 3
    assert held_after(arena, cache, stream) == 2 * MIB
    assert (cache.tensor(0, 1).numpy() == 5).all()


def test_each_release_waits_for_the_streams_of_its_own_rows(arena):
    own, side = gpumem.Stream("host"), gpumem.Stream("host")
    cache = cache_of(arena, committed=6, stream=own)
    cache.record_stream(side, 0, 2)
    with HostDriver().block(side):
        cache.release(0, 2)
        cache.release(2, 4)  # later, and done first
        assert held_after(arena, cache, own) == 4 * MIB
    assert held_after(arena, cache, side) == 2 * MIB


def test_recorded_stream_of_a_tensor_of_rows_holds_these_rows_only(arena):
    own, side = gpumem.Stream("host"), gpumem.Stream("host")
    cache = cache_of(arena, committed=4, stream=own)
    cache.tensor(0, 2).buffer.record_stream(side)
    with HostDriver().block(side):
        cache.release(2, 4)
        cache.release(0, 2)
        assert held_after(arena, cache, own) == 2 * MIB
    assert held_after(arena, cache, side) == 0


def test_note_of_a_stream_ends_with_the_release_of_its_rows(arena):
    own, side = gpumem.Stream("host"), gpumem.Stream("host")
    cache = cache_of(arena, committed=2, stream=own)
    cache.record_stream(side)
    cache.release(0, 2)
    assert held_after(arena, cache, own, side) == 0
    cache.commit(2)
    with HostDriver().block(side) as gate, without_waiting(gate):
        cache.release(0, 2)
        assert held_after(arena, cache, own) == 0


def test_rows_that_are_taken_back_keep_their_note(arena):
    own, side = gpumem.Stream("host"), gpumem.Stream("host")
    cache = cache_of(arena, committed=2, stream=own)
    cache.record_stream(side)
    with HostDriver().block(side):
        cache.release(0, 2)
        cache.commit(2)  # before the work on `side` has ended
        cache.release(0, 2)
        assert held_after(arena, cache, own) == 2 * MIB
    assert held_after(arena, cache, side) == 0


def test_notes_of_streams_that_come_and_go_keep_no_slots(arena):
    cache = cache_of(arena, committed=4)
    cache.full  # noqa: B018  its notes would stay
    for _ in range(3 * 32):
        stream = gpumem.Stream("host")
        cache.record_stream(stream)
        cache.release(2, 4)
        stream.synchronize()
        cache.release(0, 2)
        arena.shrink()
        cache.commit(4)
        del stream
    assert stream_slots(arena) <= 64


def test_notes_of_streams_that_were_reset_end_without_a_release(arena):
    cache = cache_of(arena, committed=4)
    for _ in range(3 * 32):
        handle = gpumem.Stream("host")
        cache.record_stream(handle.ptr)
        handle.synchronize()
        arena.reset_stream(handle.ptr)
        del handle
    assert stream_slots(arena) <= 64


def test_record_stream_refuses_rows_that_do_not_exist(arena):
    cache, side = cache_of(arena, committed=2), gpumem.Stream("host")
    for rows in ((3, 2), (0, 65), (-1, 2)):
        with pytest.raises(ValueError, match="expected"):
            cache.record_stream(side, *rows)
    with pytest.raises(TypeError):
        cache.record_stream(side, 0.5)


def test_closed_and_dropped_tensors_wait_for_their_work(arena, stream):
    kept, dropped = (cache_of(arena, committed=2, stream=stream) for _ in range(2))
    with HostDriver().block(stream) as gate, without_waiting(gate):
        for cache in (kept, dropped):
            fill(cache, 1, stream)
        kept.close()
        del cache, dropped
        arena.shrink()
        assert arena.stats().virtual == 4 * MIB
    stream.synchronize()
    arena.shrink()
    assert arena.stats().virtual == 0


def test_arena_waits_for_the_work_when_it_closes(stream):
    arena = gpumem.Arena("host")
    cache = cache_of(arena, committed=2, stream=stream)
    gate = HostDriver().block(stream)
    fill(cache, 1, stream)
    cache.close()
    with running(arena.close):
        gate.open()
    assert arena.stats().virtual == 0


@pytest.mark.parametrize("what", ["rows", "a block"])
def test_request_at_a_limit_waits_for_released_rows_of_others(make_arena, driver, stream, what):
    arena = make_arena({"max_mem": 8 * MIB, "oom_wait_ms": 60_000})
    old, new, made = cache_of(arena, committed=8, stream=stream), cache_of(arena), []
    request = {
        "rows": lambda: new.commit(8),
        "a block": lambda: made.append(arena.allocate(8 * MIB)),
    }[what]
    gate = driver.block(stream)
    fill(old, 1, stream)
    old.release(0, 8)
    with running(request):
        gate.open()
    held = made[0].nbytes if made else new.held_nbytes
    assert (old.held_nbytes, held) == (0, 8 * MIB)


def test_commit_at_a_limit_gives_up_after_its_time(make_arena, stream):
    arena = make_arena({"max_mem": 8 * MIB, "oom_wait_ms": 1})
    old, new = cache_of(arena, committed=8, stream=stream), cache_of(arena)
    with HostDriver().block(stream):
        fill(old, 1, stream)
        old.release(0, 8)
        with pytest.raises(OutOfMemoryError):
            new.commit(2)
        old.commit(8)  # its own rows are there
        assert (old.held_nbytes, new.held_nbytes) == (8 * MIB, 0)


def test_default_stream_of_a_dlpack_consumer_is_recorded(arena, stream):
    cache = cache_of(arena, committed=2, stream=stream)
    managed = gpumem.Stream("host")
    cache.full.buffer.record_stream(managed)  # as any buffer
    for _ in range(2):  # `full` stays, and its notes with it
        with HostDriver().block(managed):
            cache.release(0, 2)
            arena.shrink()
            assert cache.held_nbytes == 2 * MIB
        assert held_after(arena, cache, managed) == 0
        cache.commit(2)


def test_captured_work_uses_rows_through_growing_and_shrinking(arena, stream):
    """A graph that was captured once is launched while other rows come and go."""
    cache = cache_of(arena, committed=2, stream=stream)
    with Graph(HostDriver(), stream, RELAXED) as graph:
        fill(cache, 9, stream)
        cache.commit(6)  # while it captures
        cache.release(4, 6)
    graph.instantiate()
    for turn in range(20):
        cache.numpy()[:] = 0
        cache.resize(1 + turn % 50)
        graph.launch()
        cache.release(1, 1 + turn % 50)
        assert (cache.tensor(0, 1).numpy() == 9).all()
    graph.destroy_instance()
    graph.destroy()


def test_many_threads_commit_and_release(arena, rng):
    caches = [cache_of(arena, committed=1) for _ in range(2)]
    seeds = [rng.random() for _ in range(4)]
    errors = []

    def work(number):
        mine = random.Random(seeds[number])
        first = 1 + number * 15
        try:
            for _ in range(100):
                cache = mine.choice(caches)
                last = first + mine.randrange(1, 15)
                cache.commit(first, last)
                array = cache.tensor(first, last).numpy()
                array[:, ::4096] = number
                assert (array[:, ::4096] == number).all()
                del array
                cache.release(first, last)
        except BaseException as error:
            errors.append(error)

    in_threads(work, range(4))
    assert not errors
    arena.shrink()
    assert [cache.held_nbytes for cache in caches] == [2 * MIB] * 2


def test_forks_child_cannot_use_it():
    child.run_quietly("""
        import os, warnings, gpumem
        warnings.simplefilter("ignore", DeprecationWarning)
        arena = gpumem.Arena("host")
        cache = arena.virtual((64, 1 << 20), "uint8", committed=2)
        array = cache.numpy()
        if os.fork() == 0:
            for call in (lambda: cache.commit(4), lambda: cache.release(3, 4), cache.tensor):
                try:
                    call()
                except gpumem.errors.ClosedError:
                    continue
                print("the parent's tensor served its child")
            del array, cache
        else:
            assert os.wait()[1] == 0
            array[:] = 1
            cache.commit(4)
    """)

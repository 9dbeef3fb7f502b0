"""Several threads at one arena: every block has one owner, every count adds up."""

import queue
import threading

import numpy as np
import pytest
from helpers.threads import in_threads

import gpumem

KIB, MIB = 1 << 10, 1 << 20
THREADS = 4


def run_together(work, count=THREADS):
    """Run work(number) in several threads that start at once; re-raises their first error."""
    start = threading.Barrier(count)
    errors = []

    def run(number):
        start.wait()
        try:
            work(number)
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    in_threads(run, range(count))
    if errors:
        raise errors[0]


def write_cookie(buffer, cookie):
    np.frombuffer(buffer, np.uint8)[:] = cookie


def check_cookie(buffer, cookie):
    assert (np.frombuffer(buffer, np.uint8) == cookie).all(), "another block's bytes"


@pytest.mark.parametrize("policy", ["completed", "wait", "never"])
def test_blocks_of_several_threads_do_not_overlap(make_arena, rng, policy):
    arena = make_arena({"stream_reuse": policy, "split_rule": "tight"})
    seeds = [rng.random() for _ in range(THREADS)]

    def work(number):
        import random

        own = random.Random(seeds[number])
        stream = gpumem.Stream("host")
        held = []
        for _ in range(2000):
            if held and own.random() < 0.5:
                buffer, cookie = held.pop(own.randrange(len(held)))
                check_cookie(buffer, cookie)
                buffer.close()
            else:
                buffer = arena.allocate(own.randrange(1, 200 * KIB), stream)
                write_cookie(buffer, cookie := own.randrange(256))
                held.append((buffer, cookie))
        for buffer, cookie in held:
            check_cookie(buffer, cookie)

    run_together(work)
    arena.check_invariants()
    stats = arena.stats()
    assert (stats.in_use, stats.num_frees) == (0, stats.num_allocs)


def test_blocks_handed_from_thread_to_thread_keep_their_bytes(arena, rng):
    hand_over = queue.Queue(maxsize=50)
    sizes = [rng.randrange(1, 50 * KIB) for _ in range(THREADS // 2 * 2000)]

    def work(number):
        if number % 2:
            while (item := hand_over.get()) is not None:
                buffer, cookie = item
                check_cookie(buffer, cookie)
                buffer.close()
        else:
            for size in sizes[number // 2 :: THREADS // 2]:
                buffer = arena.allocate(size)
                write_cookie(buffer, size % 251)
                hand_over.put((buffer, size % 251))
            hand_over.put(None)

    run_together(work)
    arena.check_invariants()
    assert arena.stats().num_frees == arena.stats().num_allocs == len(sizes)


def test_one_buffer_closed_by_all_threads_is_freed_once(arena):
    buffers = [arena.allocate(1000) for _ in range(2000)]
    streams = [gpumem.Stream("host") for _ in range(THREADS)]

    def work(number):
        for index, buffer in enumerate(buffers):
            buffer.close(streams[number] if index % 2 else None)

    run_together(work)
    assert arena.stats().num_frees == 2000
    arena.check_invariants()


def test_views_of_many_threads_leave_nothing(arena):
    buffer = arena.allocate(10 * KIB)
    write_cookie(buffer, 5)

    def work(number):
        for _ in range(300):
            views = [np.from_dlpack(buffer), np.frombuffer(buffer, np.uint8), memoryview(buffer)]
            assert views[number % 3][number] == 5

    run_together(work)
    buffer.close()
    assert arena.stats().in_use == 0


def test_concurrent_growth_shrink_and_inspection_keep_invariants(make_arena):
    arena = make_arena({"extend_strategy": "same_as_requested", "max_mem": 64 * MIB})

    def work(number):
        stream = gpumem.Stream("host")
        for step in range(150):
            buffer = arena.allocate((number + 1) * MIB, stream)
            if step % 7 == number:
                arena.shrink()
            if step % 5 == number:
                stats = arena.stats()
                assert stats.in_use <= stats.reserved <= 64 * MIB
                assert sum(block.allocated_nbytes for block in arena.blocks()) > 0
                arena.check_invariants()
            buffer.close()

    run_together(work)
    arena.check_invariants()
    assert arena.shrink().retained == ()
    assert arena.stats().reserved == 0


def test_persistent_blocks_of_several_threads_release_their_regions(arena):
    def work(number):
        for _ in range(2000):
            arena.allocate_persistent(256 * (number + 1)).close()

    run_together(work)
    arena.shrink()
    stats = arena.stats()
    assert (stats.num_regions, stats.reserved) == (0, 0)
    assert stats.num_reserves == THREADS * 2000


def test_threads_that_compete_for_the_last_bytes_get_a_block_or_an_error(make_arena):
    arena = make_arena({"max_mem": MIB, "split_rule": "tight"})
    outcomes = queue.SimpleQueue()

    def work(number):
        for _ in range(300):
            try:
                buffer = arena.allocate(300 * KIB)
            except gpumem.OutOfMemoryError:
                outcomes.put("refused")
            else:
                write_cookie(buffer, number)
                check_cookie(buffer, number)
                buffer.close()
                outcomes.put("served")

    run_together(work)
    assert outcomes.qsize() == THREADS * 300
    assert arena.stats().max_reserved <= MIB
    assert arena.allocate(MIB).nbytes == MIB


def test_arenas_of_several_threads_return_all_memory():
    device = gpumem.Device("host")
    before = device.free_bytes

    def work(number):
        for _ in range(40):
            arena = gpumem.Arena("host")
            buffer = arena.allocate(MIB)
            if number % 2:
                del arena
                view = memoryview(buffer)
                del buffer
                view[0] = 1
            else:
                buffer.close()
                arena.close()

    run_together(work)
    assert device.free_bytes == before


def test_default_stream_is_per_thread(make_arena):
    """Handle 2 names another stream in each thread, so their blocks must not mix."""
    arena = make_arena({"stream_reuse": "never", "max_mem": MIB, "split_rule": "tight"})
    pin = arena.allocate(256, 2)
    arena.allocate(MIB - 256, 2).close()
    refused = []

    def work(_):
        try:
            arena.allocate(MIB - 256, 2).close()
        except gpumem.OutOfMemoryError:
            refused.append(True)

    run_together(work, 1)
    assert refused == [True]
    arena.allocate(MIB - 256, 2).close()
    pin.close()

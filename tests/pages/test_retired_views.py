"""Pages that move again while work is still queued through the mapping they left."""

from __future__ import annotations

import gc
import random

import pytest
from helpers.driver import HostDriver

import gpumem
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
INVALID_VALUE = 1
MOVES_ALL = {"backing": "virtual", "page_move_threshold": 0, "page_move_budget": 1}
STEPS = 120
MOST_LIVE = 40 * MIB  # at which a step frees


def alive(host):
    release_retired()
    return {name: host.live()[name] for name in ("handles", "mappings", "reservations")}


def run(arena, stream, seed):
    """Allocate and free whole pages, each filled on the stream; return the live blocks' values.

    What the driver refuses is left out.
    """
    driver, rng, live = HostDriver(), random.Random(seed), {}
    for step in range(STEPS):
        total = sum(block.nbytes for block in live)
        if live and (total > MOST_LIVE or rng.random() < 0.45):
            block = rng.choice(list(live))
            del live[block]
            block.close()
            continue
        nbytes = rng.choice([2, 4, 6, 8, 12]) * MIB
        try:
            block = arena.allocate(nbytes, stream)
        except gpumem.errors.DriverError:
            continue
        driver.fill(block, step + 1, stream)
        live[block] = step + 1
    return live


def held(live):
    """Whether each block has its bytes; the blocks are closed."""
    right = all(bytes(block) == bytes([value]) * block.nbytes for block, value in live.items())
    while live:
        live.popitem()[0].close()
    return right


@pytest.mark.parametrize("seed", [5, 7, 10])
def test_pages_move_again_before_the_work_of_their_stream_is_done(make_arena, stream, seed):
    arena = make_arena(MOVES_ALL)
    with HostDriver().block(stream):
        live = run(arena, stream, seed)
        arena.check_invariants()
        # Blocks are whole pages and no work ends: idle pages serve every block.
        assert arena.stats().max_reserved == arena.stats().max_in_use
    stream.synchronize()
    assert held(live)


@pytest.mark.parametrize("seed", [5, 10])
def test_shrink_releases_pages_that_moved_again_once_the_work_is_done(
    make_arena, host, stream, seed
):
    arena = make_arena(MOVES_ALL)
    before = alive(host)["mappings"]
    with HostDriver().block(stream):
        live = run(arena, stream, seed)
        used = arena.stats().in_use
        arena.shrink()
        assert arena.stats().reserved > used  # work is queued through what is idle
    stream.synchronize()
    arena.shrink()
    arena.check_invariants()
    assert arena.stats().reserved == used
    # Each page keeps at most the mapping from before its last move.
    assert alive(host)["mappings"] - before <= 2 * used // (2 * MIB)
    assert held(live)


def test_pages_that_moved_again_sleep_and_wake_with_their_bytes(make_arena, stream):
    arena = make_arena(MOVES_ALL)
    with HostDriver().block(stream):
        live = run(arena, stream, 5)
    arena.sleep()
    assert arena.stats().reserved == 0
    arena.wake()
    arena.check_invariants()
    assert held(live)


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 11])
def test_refused_call_loses_no_byte_and_no_mapping_of_pages_that_moved_again(
    host, stream, call, number
):
    gc.collect()
    before = alive(host)
    arena = gpumem.Arena("host", MOVES_ALL)
    with HostDriver().block(stream):
        live = run(arena, stream, 10)
    stream.synchronize()
    host.fail(call, number, INVALID_VALUE, 0)
    more = run(arena, stream, 5)
    refused = host.last_fault()
    host.clear_faults()
    assert refused == call
    arena.check_invariants()
    stream.synchronize()
    assert held(live)
    assert held(more)
    arena.close()
    del arena
    assert alive(host) == before


def test_sleep_unmaps_what_a_refused_call_left_of_pages_that_moved_again(make_arena, host, stream):
    arena = make_arena(MOVES_ALL)
    before = alive(host)["mappings"]
    with HostDriver().block(stream):
        live = run(arena, stream, 5)
    stream.synchronize()
    host.fail("cuMemUnmap", 1, INVALID_VALUE)
    arena.sleep()
    assert host.last_fault() == "cuMemUnmap"
    host.clear_faults()
    assert alive(host)["mappings"] == before
    assert arena.stats().reserved == 0
    arena.wake()
    arena.check_invariants()
    assert held(live)


def test_block_goes_right_behind_a_place_that_is_still_worked_in(make_arena, stream):
    arena = make_arena(MOVES_ALL)
    first, middle, last, pin = (arena.allocate(size * MIB) for size in (2, 4, 8, 2))
    behind = last.ptr
    assert behind == first.ptr + 6 * MIB
    first.close()
    last.close()
    gpumem.Device("host").synchronize()
    arena.shrink()  # nothing is mapped below the middle and behind it
    with HostDriver().block(stream):
        middle.close(stream)
        moved = arena.allocate(16 * MIB, stream)
        above = arena.allocate(16 * MIB)
        moved.close()
        held = arena.allocate(18 * MIB, stream)
        assert arena.stats().pages_moved == 2 + 8  # those of the middle twice
        block = arena.allocate(6 * MIB, stream)
        assert block.ptr == behind
        arena.check_invariants()
    for ended in (block, held, above, pin):
        ended.close()


@pytest.mark.parametrize("refused", [0, 1])
def test_driver_calls_count_each_mapping_that_goes_before_pages_sleep(
    make_arena, host, stream, refused
):
    named = ("cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventQuery")

    def others_counted(arena):
        """Let it sleep; return how many calls it counts besides those named."""
        before = arena.stats().driver_calls - sum(map(host.call_count, named))
        arena.sleep()
        return arena.stats().driver_calls - sum(map(host.call_count, named)) - before

    plain, moved = make_arena(MOVES_ALL), make_arena(MOVES_ALL)
    block = plain.allocate(4 * MIB, stream)
    with HostDriver().block(stream):
        live = run(moved, stream, 5)
    stream.synchronize()
    expected = others_counted(plain)
    if refused:  # then the sleep itself unmaps what is left
        host.fail("cuMemUnmap", 1, INVALID_VALUE)
    assert others_counted(moved) == expected
    host.clear_faults()
    for arena in (plain, moved):
        arena.wake()
    assert held(live)
    block.close()

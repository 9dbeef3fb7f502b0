"""Pinned memory in exact regions: a large block has one of its own size, and idle ones are few."""

import random

import pytest
from helpers.waiting import without_waiting

import gpumem

KIB, MIB = 1 << 10, 1 << 20
PINNED = "host/host_accessible"
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN


@pytest.fixture
def arena(make_arena):
    return make_arena({}, PINNED)


def reserved(arena):
    return arena.stats().reserved


def test_large_blocks_have_regions_of_their_own_pages(arena):
    sizes = [65 * MIB, MIB + 1, 3 * MIB + 17]
    blocks = [arena.allocate(size) for size in sizes]
    assert reserved(arena) == sum(-(-block.nbytes // 4096) * 4096 for block in blocks)
    arena.check_invariants()


def test_small_blocks_share_registered_huge_pages(arena, host):
    calls = host.call_count("cuMemHostRegister"), host.call_count("cuMemHostAlloc")
    blocks = [arena.allocate(64 * KIB), arena.allocate(MIB)]
    assert reserved(arena) == 2 * MIB
    after = host.call_count("cuMemHostRegister"), host.call_count("cuMemHostAlloc")
    assert after == (calls[0] + 1, calls[1])
    blocks += [arena.allocate(40 * KIB) for _ in range(100)]
    assert reserved(arena) <= 7 * MIB
    arena.check_invariants()


def test_regions_of_very_small_blocks_begin_small_and_double(arena):
    blocks = [arena.allocate(40 * KIB)]
    assert reserved(arena) == 64 * KIB
    blocks += [arena.allocate(40 * KIB) for _ in range(100)]
    assert reserved(arena) <= 2 * 100 * 40 * KIB
    arena.check_invariants()


def test_freed_block_is_found_again_without_a_driver_call(arena, host):
    sizes = [2 * MIB, 33 * MIB + 100, 5 * MIB]
    for block in [arena.allocate(size) for size in sizes]:
        block.close()
    before, calls = reserved(arena), host.call_count()
    again = [arena.allocate(size) for size in reversed(sizes)]
    assert (reserved(arena), host.call_count(), len(again)) == (before, calls, 3)


def test_small_block_leaves_an_idle_large_region_whole(arena):
    arena.allocate(8 * MIB).close()
    with arena.allocate(64 * KIB):
        arena.shrink()
        assert reserved(arena) == 2 * MIB, "the region that small blocks share"


def test_held_bytes_follow_the_live_peak_of_random_sizes(arena):
    draw = random.Random(1)
    live, asked, peak, held = [], 0, 0, 0
    for _ in range(400):
        size = draw.randrange(MIB + 1, 6 * MIB)
        while asked + size > 96 * MIB:
            block = live.pop(draw.randrange(len(live)))
            asked -= block.nbytes
            block.close()
        live.append(arena.allocate(size))
        asked += size
        peak, held = max(peak, asked), max(held, reserved(arena))
        assert held <= 1.03 * peak
    arena.check_invariants()


def test_as_few_idle_bytes_as_possible_make_room(make_arena):
    arena = make_arena({"page_move_threshold": 0}, PINNED)
    for block in [arena.allocate(size * MIB) for size in (4, 30, 10)]:
        block.close()
    with arena.allocate(32 * MIB):
        assert reserved(arena) == (10 + 32) * MIB, "the largest, then the smallest that suffices"


def test_larger_share_lets_a_block_have_a_larger_region(make_arena, host):
    arena = make_arena({"page_move_threshold": 1.0}, PINNED)
    arena.allocate(10 * MIB).close()
    calls = host.call_count("cuMemHostRegister")
    arena.allocate(11 * MIB).close()
    arena.allocate(6 * MIB).close()
    assert host.call_count("cuMemHostRegister") == calls + 1


def test_limit_releases_idle_regions_at_once(make_arena):
    arena = make_arena({"max_mem": 16 * MIB, "page_move_threshold": 9.0}, PINNED)
    arena.allocate(9 * MIB).close()
    with arena.allocate(12 * MIB):
        assert reserved(arena) == 12 * MIB
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(17 * MIB)


def test_nothing_is_released_while_a_stream_works(make_arena, streams, driver):
    arena, other = make_arena({}, PINNED), make_arena({})
    with driver.block(streams[0]) as gate:
        busy = other.allocate(MIB, streams[0])
        driver.fill(busy, 1, streams[0])
        arena.allocate(8 * MIB).close()
        with without_waiting(gate):
            arena.allocate(9 * MIB).close()
        assert reserved(arena) == 17 * MIB
        with without_waiting(gate):
            block = arena.allocate(5 * MIB)
        assert reserved(arena) == 17 * MIB, "meanwhile it may take a larger region"
        gate.open()
        streams[0].synchronize()
    block.close()
    with arena.allocate(20 * MIB):
        assert reserved(arena) <= 21 * MIB


def test_region_that_the_driver_keeps_serves_again(arena, host):
    arena.allocate(8 * MIB).close()
    host.fail("cuMemHostUnregister", 1, UNKNOWN)
    with arena.allocate(9 * MIB):
        assert reserved(arena) == 17 * MIB
    arena.check_invariants()
    calls = host.call_count("cuMemHostRegister")
    with arena.allocate(8 * MIB):
        assert host.call_count("cuMemHostRegister") == calls


@pytest.mark.parametrize(
    "config",
    [{"backing": "regions"}, {"initial_chunk_size_bytes": 16 * MIB}, {"split_rule": "ort"}],
)
def test_settings_of_growth_choose_regions_that_blocks_share(make_arena, config):
    arena = make_arena(config, PINNED)
    arena.allocate(3 * MIB)
    assert reserved(arena) != 3 * MIB

"""Where a block of an arena of pages goes: low, so that what is free stays in one piece."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.driver import HostDriver

from gpumem import Device

MIB = 1 << 20
VIRTUAL = {"backing": "virtual"}
REGIONS = {"backing": "regions", "initial_chunk_size_bytes": 64 * MIB}


def row(arena, *sizes):
    """Take blocks of so many MiB, which lie one behind the other."""
    blocks = [arena.allocate(int(size * MIB)) for size in sizes]
    for before, after in itertools.pairwise(blocks):
        assert after.ptr == before.ptr + before.nbytes
    return blocks


@pytest.mark.parametrize(
    ("config", "first", "second", "freed", "placed"),
    [
        pytest.param(VIRTUAL, 8, 4, "second first", "first", id="low before tightest"),
        pytest.param(VIRTUAL, 4, 4, "first second", "first", id="low before last freed"),
        pytest.param(VIRTUAL, 1, 1, "first second", "second", id="one MiB: last freed before low"),
        pytest.param(REGIONS, 8, 4, "second first", "second", id="regions: tightest before low"),
    ],
)
def test_block_is_placed_in_the_preferred_of_two_chunks(
    make_arena, config, first, second, freed, placed
):
    arena = make_arena(config)
    low, _a, high, _b = row(arena, first, 2, second, 2)
    chunks = {"first": low, "second": high}
    place = chunks[placed].ptr
    for name in freed.split():
        chunks[name].close()
    assert arena.allocate(second * MIB).ptr == place


def test_beside_pending_memory_the_tightest_chunk_is_allocated(make_arena, stream):
    arena = make_arena(VIRTUAL)
    other = arena.allocate(4 * MIB, stream=stream)
    low, _a, tight, _b, small, _c = row(arena, 8, 2, 4, 2, 2, 2)
    places = [small.ptr, tight.ptr]
    for block in (tight, low, small):
        block.close()
    with HostDriver().block(stream):
        other.close()
        taken = [arena.allocate(size * MIB) for size in (2, 4)]
        assert [block.ptr for block in taken] == places


def test_at_most_ten_bins_are_compared(make_arena):
    arena = make_arena(VIRTUAL)
    sizes = [64] + [4 + i / 8 for i in range(10)]  # of which each has a bin of its own
    blocks = [block for size in sizes for block in row(arena, size, 2)]
    lowest = blocks[0].ptr
    second = blocks[2].ptr
    for block in blocks[::2]:
        block.close()
    assert arena.allocate(4 * MIB).ptr == second != lowest


def moved_up(make_arena):
    """Pages of two low places that moved up for a block, which is free again; the lower place."""
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    low, _a, high, _b = keep = row(arena, 4, 2, 4, 2)
    place = low.ptr
    low.close()
    high.close()
    arena.allocate(8 * MIB).close()
    assert arena.stats().pages_moved == 4
    return arena, place, keep


def test_block_goes_to_a_low_place_that_idle_pages_were_moved_from(make_arena):
    arena, place, _keep = moved_up(make_arena)
    before = arena.stats()
    block = arena.allocate(3 * MIB)
    assert block.ptr == place
    after = arena.stats()
    assert (after.driver_calls, after.pages_moved) == (before.driver_calls, before.pages_moved)
    assert after.reserved == before.reserved
    arena.check_invariants()


def test_block_that_leaves_little_of_a_chunk_stays_out_of_low_places(make_arena):
    arena, place, _keep = moved_up(make_arena)
    assert arena.allocate(5 * MIB).ptr > place


def test_low_place_keeps_the_bytes_of_blocks_beside_it(make_arena):
    arena, place, keep = moved_up(make_arena)
    blocks = [block for block in keep if block.nbytes == 2 * MIB]
    blocks += [arena.allocate(3 * MIB), arena.allocate(2 * MIB), arena.allocate(3 * MIB)]
    assert blocks[2].ptr == place
    for value, block in enumerate(blocks):
        np.frombuffer(block, np.uint8)[:] = value
    for value, block in enumerate(blocks):
        assert (np.frombuffer(block, np.uint8) == value).all()
    arena.check_invariants()


def low_after(make_arena, pinned, vain):
    """Take 6 MiB again and again; after so many times in vain, they have a low place.

    Returns how many times later it was found.
    """
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    low, beside, pin = row(arena, 4, 2, pinned)
    place = low.ptr
    low.close()
    arena.allocate(12 * MIB).close()  # on the pages of the low place, among others
    for _ in range(vain):
        with arena.allocate(6 * MIB) as block:
            assert block.ptr > pin.ptr
    beside.close()
    for number in itertools.count(1):
        with arena.allocate(6 * MIB) as block:
            if block.ptr < pin.ptr:
                assert block.ptr == place
                return number


@pytest.mark.parametrize(("vain", "later"), [(1, 4), (2, 3), (4, 1), (5, 4), (8, 1)])
def test_after_a_search_in_vain_three_like_it_are_left_out(make_arena, vain, later):
    assert low_after(make_arena, 320, vain) == later


@pytest.mark.parametrize(("pinned", "later"), [(300, 1), (300 + 1 / 4096, 4)])
def test_no_search_is_left_out_for_a_fiftieth_of_what_is_in_use(make_arena, pinned, later):
    assert low_after(make_arena, pinned, 1) == later


def test_no_search_is_left_out_for_a_smaller_block_than_the_last_in_vain(make_arena):
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    low, _beside, pin = row(arena, 4, 2, 320)
    place = low.ptr
    low.close()
    arena.allocate(12 * MIB).close()
    assert arena.allocate(6 * MIB - 256).ptr > pin.ptr
    assert arena.allocate(4 * MIB).ptr == place


def test_no_search_is_left_out_after_one_that_found_a_low_place(make_arena):
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    low, _a, next_low, _b, _pin = row(arena, 4, 2, 8, 2, 420)
    places = [low.ptr, next_low.ptr]
    low.close()
    next_low.close()
    arena.allocate(40 * MIB).close()
    taken = [arena.allocate(size * MIB) for size in (4, 8)]
    assert [block.ptr for block in taken] == places


# Of six pages that moved up from a low place, one has a block: the places before and behind it.
@pytest.mark.parametrize(
    ("busy", "size", "place"),
    [(3, 6, 0), (3, 4, 0), (1, 8, 4), (2, 6, 6), (0, 9, 2), (5, 9, 0), (3, 7, None), (1, 9, None)],
)
def test_block_goes_to_the_lowest_idle_pages_in_a_row_that_hold_it(make_arena, busy, size, place):
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    low, _a, pin = row(arena, 12, 2, 64)
    begin = low.ptr
    low.close()
    arena.allocate(40 * MIB).close()  # 14 new pages, and behind them those of the low place
    assert arena.stats().pages_moved == 6
    filler = arena.allocate((28 + 2 * busy) * MIB + 256)
    _block = arena.allocate(MIB)
    filler.close()
    before = arena.stats()
    taken = arena.allocate(size * MIB)
    assert taken.ptr > pin.ptr if place is None else taken.ptr == begin + place * MIB
    assert arena.stats().driver_calls == before.driver_calls
    arena.check_invariants()


def test_block_goes_to_a_low_place_that_begins_with_free_memory(make_arena):
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    beside, low, _a, _pin = row(arena, 2, 4, 2, 64)
    place = beside.ptr
    low.close()
    arena.allocate(24 * MIB).close()
    beside.close()
    assert arena.allocate(6 * MIB).ptr == place


def test_block_goes_behind_a_low_page_in_use_that_cuts_a_row_in_two(make_arena):
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    low, between, behind, _a, _pin = row(arena, 4, 2, 10, 2, 64)
    place = behind.ptr + 2 * MIB
    low.close()
    behind.close()
    arena.allocate(40 * MIB).close()  # 13 new pages, and behind them two and five that moved
    assert arena.stats().pages_moved == 7
    filler = arena.allocate(30 * MIB + 256)
    _block = arena.allocate(MIB)
    filler.close()
    between.close()
    assert arena.allocate(8 * MIB).ptr == place


def test_block_is_placed_on_idle_pages_behind_a_low_place_without_memory(make_arena):
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "page_move_budget": 1})
    first, low, _a, _pin = row(arena, 2, 6, 2, 64)
    place = low.ptr
    first.close()
    Device("host").synchronize()
    arena.shrink()
    low.close()
    arena.allocate(40 * MIB).close()
    assert arena.stats().pages_moved == 3
    assert arena.allocate(6 * MIB).ptr == place

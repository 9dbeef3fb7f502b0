"""Memory that an arena made for lack of time to move pages is released at a later growth.

All clocks are virtual: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import pytest

import gpumem
from gpumem._testing.arenas import saved_move_time, spend_move_time

MIB = 1 << 20
MS = 10**6
SECOND = 10**9
LARGE = 8 * MIB
BEFORE = 40 * MIB  # live peak of `crowded`, and what it reserves
# Half of the 100 ms that are saved up come within 0.1 s.
SETTINGS = {"page_move_threshold": 0, "page_move_budget": 0.5}


@pytest.fixture
def crowded(make_arena, virtual_clock):
    """Make arenas in which nothing is idle: every page of 40 MiB keeps one of two blocks."""
    held = []

    def make(**settings):
        arena = make_arena(SETTINGS | settings)
        blocks = [arena.allocate(MIB) for _ in range(40)]
        held.extend(blocks[::2])
        for block in blocks[1::2]:
            block.close()
        return arena

    yield make
    for block in held:
        block.close()


def hurried(arena, nbytes=LARGE):
    """Return a block for which there was no time to move pages."""
    spend_move_time(arena, 200 * MS)  # of at most 100 ms
    return arena.allocate(nbytes)


def overdrawn(arena):
    """Make 18 MiB for lack of time, and leave two idle pieces of 8 MiB with 2 MiB between them."""
    first, between, second = (hurried(arena, nbytes) for nbytes in (LARGE, 2 * MIB, LARGE))
    first.close()
    second.close()
    assert arena.stats().reserved == BEFORE + 18 * MIB
    return between


def grow(arena, nbytes=11 * MIB):
    """Allocate and free a block that no free chunk holds, once all work is done."""
    gpumem.Device("host").synchronize()
    arena.reset_stream(None)
    arena.allocate(nbytes).close()


def test_next_growth_with_time_releases_pages_that_it_leaves_idle(crowded, virtual_clock):
    arena = crowded()
    between = overdrawn(arena)
    virtual_clock.advance_clock(60 * SECOND)
    grow(arena)
    stats = arena.stats()
    assert (stats.pages_moved, stats.num_shrinkages) == (1, 2), "of 3 idle pages"
    assert stats.reserved == BEFORE + 14 * MIB
    between.close()


def test_growth_without_time_releases_nothing(crowded, virtual_clock):
    arena = crowded()
    between = overdrawn(arena)
    grow(arena)
    assert arena.stats().num_shrinkages == 0
    between.close()


def test_idle_pages_within_the_share_stay(crowded, virtual_clock):
    """The live peak has risen since to all but 2 MiB of the memory."""
    arena = crowded()
    between = overdrawn(arena)
    filled = [arena.allocate(nbytes) for nbytes in [LARGE] * 2 + [MIB] * 18]
    for block in filled:
        block.close()
    assert arena.stats().max_in_use == BEFORE + 16 * MIB
    virtual_clock.advance_clock(60 * SECOND)
    grow(arena)
    assert arena.stats().num_shrinkages == 1
    between.close()


def test_an_arena_that_does_not_grow_keeps_its_memory_and_makes_no_driver_call(
    crowded, virtual_clock
):
    arena = crowded()
    hurried(arena).close()
    virtual_clock.advance_clock(60 * SECOND)
    before = arena.stats().driver_calls
    for number in range(1000):
        arena.allocate((256 + 64 * (number % 2)) << 10).close()
    assert arena.stats().reserved == BEFORE + LARGE
    assert arena.stats().driver_calls == before


def test_memory_made_because_nothing_was_idle_stays(crowded, virtual_clock):
    arena = crowded()
    arena.allocate(LARGE).close()
    virtual_clock.advance_clock(60 * SECOND)
    grow(arena)
    assert arena.stats().num_shrinkages == 0


def test_without_a_move_budget_nothing_is_released(crowded, virtual_clock):
    arena = crowded(page_move_budget=0)
    between = overdrawn(arena)
    virtual_clock.advance_clock(60 * SECOND)
    grow(arena)
    assert arena.stats().num_shrinkages == 0
    between.close()


def test_prepared_memory_stays(crowded, virtual_clock):
    arena = crowded()
    spend_move_time(arena, 200 * MS)
    arena.prepare(LARGE)
    virtual_clock.advance_clock(60 * SECOND)
    grow(arena)
    assert arena.stats().num_shrinkages == 0


def test_memory_that_was_shrunk_is_not_released_a_second_time(crowded, virtual_clock):
    """Memory that is prepared afterwards stays, idle as it is."""
    arena = crowded()
    hurried(arena).close()
    gpumem.Device("host").synchronize()
    arena.shrink()
    assert arena.stats().reserved == BEFORE
    shrunk = arena.stats().num_shrinkages
    arena.prepare(LARGE)
    virtual_clock.advance_clock(60 * SECOND)
    grow(arena)
    assert arena.stats().num_shrinkages == shrunk


def test_the_time_of_releasing_comes_out_of_the_move_budget(crowded, virtual_clock):
    arena = crowded(page_move_budget=0.01)
    between = overdrawn(arena)
    virtual_clock.advance_clock(60 * SECOND)
    virtual_clock.use_h200_costs(True)
    try:
        grow(arena)
    finally:
        virtual_clock.use_h200_costs(False)
    assert arena.stats().num_shrinkages > 0
    assert saved_move_time(arena) < 100 * MS, "full before"
    between.close()

"""The bound on the time that moving pages takes."""

from __future__ import annotations

import random

import pytest

import gpumem
from gpumem._testing import host_device
from gpumem.replay import replay
from gpumem.traces import Trace

MIB = 1 << 20
SECOND = 10**9


def crowded(make_arena, **settings):
    """Make an arena whose idle pages lie on both sides of a live one: 8 MiB in two halves."""
    arena = make_arena({"backing": "virtual", "page_move_threshold": 0} | settings)
    first, pin, second = (arena.allocate(size * MIB) for size in (4, 2, 4))
    first.close()
    second.close()
    return arena, pin


def test_within_the_move_budget_pages_move_instead_of_growing(make_arena):
    arena, pin = crowded(make_arena, page_move_budget=1)
    arena.allocate(8 * MIB).close()
    stats = arena.stats()
    assert stats.pages_moved > 0
    assert (stats.reserved, stats.moves_refused) == (10 * MIB, 0)
    pin.close()


def test_without_a_move_budget_the_arena_grows_and_moves_nothing(make_arena):
    arena, pin = crowded(make_arena, page_move_budget=0)
    arena.allocate(8 * MIB).close()
    stats = arena.stats()
    assert stats.pages_moved == 0
    assert stats.moves_refused > 0
    assert stats.reserved > 10 * MIB
    pin.close()


def test_at_max_mem_pages_move_regardless_of_the_move_budget(make_arena):
    arena, pin = crowded(make_arena, page_move_budget=0, max_mem=10 * MIB)
    assert arena.allocate(8 * MIB).nbytes == 8 * MIB
    assert arena.stats().pages_moved > 0
    assert arena.stats().max_reserved == 10 * MIB
    pin.close()


def test_spent_move_budget_refills_with_time(make_arena, virtual_clock):
    virtual_clock.use_h200_costs(True)
    try:
        arena = make_arena(
            {"backing": "virtual", "page_move_threshold": 0, "page_move_budget": 0.01}
        )
        moved = move_until_refused(arena)
        assert moved > 1000, "100 ms of moves are saved up at first, at 45 us each"
        virtual_clock.advance_clock(SECOND)
        again = move_until_refused(arena)
        assert 0 < again < moved, "a second brings 10 ms"
    finally:
        virtual_clock.use_h200_costs(False)


def move_until_refused(arena):
    """Ask for shapes that only moving serves, until memory is made instead; return the moves."""
    before = arena.stats()
    for _ in range(2000):
        arena.shrink()
        first, pin, second = (arena.allocate(size * MIB) for size in (4, 2, 4))
        first.close()
        second.close()
        arena.allocate(8 * MIB).close()
        pin.close()
        if arena.stats().moves_refused > before.moves_refused:
            return arena.stats().pages_moved - before.pages_moved
    raise AssertionError("the budget never ran out")


@pytest.mark.parametrize("share", [-0.1, 1.1, "1.0.0", "many"])
def test_move_budget_must_be_a_fraction_of_time(share):
    with pytest.raises(gpumem.ConfigError, match="page_move_budget"):
        gpumem.ArenaConfig(page_move_budget=share)


def shuffled_trace(us):
    """Blocks of random sizes, of which random ones make room, and one that lives on."""
    rng = random.Random(7)
    live: list[tuple[int, int]] = []
    events = [(0, 0, 600 * MIB)]
    total = 0
    for number in range(1, 8000):
        size = rng.randrange(1, 24 * MIB)
        while total + size > 300 * MIB:
            block, freed = live.pop(rng.randrange(len(live)))
            events.append((2, block, freed))
            total -= freed
        live.append((number, size))
        events.append((0, number, size))
        total += size
    action, block, nbytes = zip(*events, strict=True)
    times = [us * event for event in range(len(events))]
    return Trace(action, block, nbytes, [0] * len(events), times)


def test_replay_counts_the_time_for_moves_by_the_times_of_the_trace():
    config = {"backing": "virtual", "page_move_threshold": 0}
    host_device.use_h200_costs(True)
    try:
        fast, slow = (replay(shuffled_trace(us), "host", config=config) for us in (0, 10_000))
    finally:
        host_device.use_h200_costs(False)
    assert fast.pages_moved < slow.pages_moved / 2
    assert fast.fragmentation > slow.fragmentation + 0.05

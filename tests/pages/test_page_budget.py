"""The bound on the time that moving pages takes."""

from __future__ import annotations

import random

import pytest

import gpumem
from gpumem._testing import host_device
from gpumem._testing.arenas import saved_move_time, spend_move_time
from gpumem.replay import replay
from gpumem.traces import Trace

MIB = 1 << 20
MS = 10**6


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


@pytest.mark.parametrize(("milliseconds", "moves"), [(99, False), (101, True)])
def test_spent_move_budget_refills_with_time(make_arena, virtual_clock, milliseconds, moves):
    arena, pin = crowded(make_arena, page_move_budget=0.01)
    spend_move_time(arena, 101 * MS)  # of 100 ms that are saved up at first
    virtual_clock.advance_clock(milliseconds * MS)
    arena.allocate(8 * MIB).close()
    assert (arena.stats().pages_moved > 0) == moves
    pin.close()


@pytest.mark.parametrize(
    ("overdrawn", "beyond"), [(-1, 0), (1, 16), (200, 25), (400, 100), (500, 156), (2400, 198)]
)
def test_the_further_the_budget_is_overdrawn_the_more_pages_are_made(
    make_arena, virtual_clock, overdrawn, beyond
):
    """MiB of the 198 that are missing: of a live peak of 400, the square of the time in 800 ms."""
    arena = make_arena({"backing": "virtual", "page_move_threshold": 0})
    first, pin, second = (arena.allocate(size * MIB) for size in (198, 4, 198))
    first.close()
    second.close()
    spend_move_time(arena, int(saved_move_time(arena)) + overdrawn * MS)
    arena.allocate(396 * MIB).close()
    made = arena.stats().reserved / MIB - 400
    assert beyond - 2 < made <= beyond, "a page of 2 MiB less at most"
    assert (arena.stats().pages_moved > 0) == (beyond < 198)
    pin.close()


@pytest.mark.parametrize("share", [0.01, 0])
def test_moves_may_take_as_long_as_new_pages_took(make_arena, virtual_clock, share):
    """A program that gave its memory back makes it anew, and moves some of it meanwhile."""
    arena, pin = crowded(make_arena, page_move_budget=share)
    spend_move_time(arena, 100 * MS)
    assert saved_move_time(arena) <= 0
    virtual_clock.use_h200_costs(True)
    try:
        grown = arena.allocate(64 * MIB)
    finally:
        virtual_clock.use_h200_costs(False)
    assert (saved_move_time(arena) > 0) == (share > 0)
    grown.close()
    pin.close()


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
    for number in range(1, 32000):
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

"""What virtual tensors are charged, where they are counted, and how they give way."""

from __future__ import annotations

import sys

import pytest

import gpumem
from gpumem.errors import BudgetExceededError, OutOfMemoryError

MIB = 1 << 20


def cache_of(arena, rows=64, **settings):
    return arena.virtual((rows, MIB), "uint8", **{"step": 2} | settings)


def test_statistics_count_pages_in_use_and_held(arena):
    block = arena.allocate(3 * MIB)
    cache = cache_of(arena, ahead=4)
    cache.commit(5)
    stats = arena.stats()
    assert stats.virtual == cache.held_nbytes == 10 * MIB
    assert stats.in_use == block.allocated_nbytes + 6 * MIB
    assert stats.requested_in_use == 9 * MIB
    assert stats.reserved >= stats.in_use + 4 * MIB
    block.close()


def test_peaks_are_of_blocks_and_rows_together(arena):
    cache = cache_of(arena)
    sizes = [(6, 2), (2, 9), (10, 1), (4, 4)]
    most = 0
    for rows, mib in sizes:
        cache.resize(rows)
        with arena.allocate(mib * MIB) as block:
            most = max(most, rows * MIB + block.allocated_nbytes)
            assert arena.stats().max_in_use == most
    assert arena.stats().max_reserved >= most
    arena.shrink()
    arena.reset_peaks()
    stats = arena.stats()
    assert (stats.max_in_use, stats.max_reserved) == (4 * MIB, 4 * MIB)


def test_snapshot_counts_them(arena):
    cache = cache_of(arena, committed=4)
    counts = arena.snapshot().resources[0].counts
    assert (counts["in_use"], counts["reserved"]) == (4 * MIB, 4 * MIB)
    assert counts["max_in_use"] == 4 * MIB
    assert cache.rows


@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_limit_is_of_blocks_and_rows_together(make_arena, backing):
    arena = make_arena({"max_mem": 16 * MIB, "backing": backing, "oom_wait_ms": 0})
    cache = cache_of(arena, committed=10)
    with pytest.raises(OutOfMemoryError):
        arena.allocate(7 * MIB)
    with arena.allocate(6 * MIB), pytest.raises(OutOfMemoryError) as caught:
        cache.commit(12)
    assert cache.committed == 10
    report = caught.value.report
    assert (report.requested_nbytes, report.limits[0].used) == (2 * MIB, 16 * MIB)
    assert report.by_owner["virtual tensors"] == 10 * MIB
    assert "virtual tensors 10.0 MiB" in str(caught.value)
    del caught  # which has this frame
    cache.commit(16)  # what the block left is idle, and goes
    assert arena.stats().reserved == 16 * MIB


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_budget_is_charged_for_rows(make_arena, count):
    budget = gpumem.Budget(16 * MIB, name="tenant")
    arena = make_arena(budget=budget, count=count)
    cache = cache_of(arena, committed=10)
    assert budget.used == 10 * MIB
    with pytest.raises(BudgetExceededError, match="tenant"):
        cache.commit(20)
    assert (budget.used, cache.committed) == (10 * MIB, 10)
    cache.release(2, 10)
    assert budget.used == 2 * MIB
    budget.on_pressure = lambda which, nbytes, rows=cache: rows.resize(0)
    with arena.allocate(15 * MIB):
        assert cache.rows == ()
    budget.on_pressure = None
    cache.close()
    arena.shrink()
    assert budget.used == 0


def test_budget_ends_with_a_dropped_tensor(make_arena):
    for count in ("reserved", "in_use"):
        budget = gpumem.Budget(16 * MIB)
        arena = make_arena(budget=budget, count=count)
        cache = cache_of(arena, committed=10)
        array = cache.numpy()
        del cache
        assert budget.used == 10 * MIB
        del array
        arena.shrink()
        assert budget.used == 0


# ---- pressure ------------------------------------------------------------------------------------


def test_callback_makes_room_for_blocks_and_other_tensors(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    asked = []

    def give(tensor, nbytes):
        asked.append(nbytes)
        tensor.resize(max(tensor.committed - 4, 0))

    cache = cache_of(arena, committed=14, on_pressure=give)
    with arena.allocate(8 * MIB):
        assert cache.committed == 6
        assert asked == [8 * MIB] * 2
        other = cache_of(arena)
        other.commit(4)
        assert cache.committed == 2
        # Its own commits do not ask itself.
        with pytest.raises(OutOfMemoryError):
            cache.commit(20)
        assert len(asked) == 3


def test_callback_is_asked_where_the_driver_refuses(leave_room, arena):
    cache = cache_of(arena, committed=16, on_pressure=lambda tensor, nbytes: tensor.resize(2))
    leave_room(4 * MIB)
    with arena.allocate(12 * MIB):
        assert cache.committed == 2


def test_callback_that_frees_nothing_leaves_the_refusal(make_arena, monkeypatch):
    arena = make_arena({"max_mem": 8 * MIB})
    told, reported = [], []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def fail(tensor, nbytes):
        told.append(nbytes)
        arena.allocate(8 * MIB)  # refused, and does not come here again

    cache = cache_of(arena, committed=8, on_pressure=fail)
    with pytest.raises(OutOfMemoryError):
        arena.allocate(MIB)
    assert told == [MIB]
    assert [type(each.exc_value) for each in reported] == [OutOfMemoryError]
    reported.clear()
    cache.on_pressure = None
    with pytest.raises(OutOfMemoryError):
        arena.allocate(MIB)
    assert (told, cache.on_pressure) == ([MIB], None)


def test_memory_ahead_goes_before_anything_is_refused(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    cache = cache_of(arena, ahead=30)
    cache.commit(2)
    with arena.allocate(14 * MIB):
        assert cache.held_nbytes == 2 * MIB

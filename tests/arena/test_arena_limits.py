"""What may be changed while an arena lives: its limit, and the peaks it looks for."""

import pytest

from gpumem import Arena
from gpumem.errors import ClosedError, OutOfMemoryError

MiB = 1 << 20


@pytest.fixture(params=["regions", "virtual"])
def arena(request):
    with Arena("host", {"backing": request.param, "oom_wait_ms": 0}) as arena:
        yield arena
        arena.validate()


def test_a_lower_limit_refuses_what_would_go_beyond_it_and_a_higher_one_allows_it(arena):
    first = arena.allocate(8 * MiB)
    arena.set_limit(arena.stats().reserved)
    assert arena.stats().limit == arena.stats().reserved
    with pytest.raises(OutOfMemoryError):
        arena.allocate(64 * MiB)
    arena.set_limit(0)
    second = arena.allocate(64 * MiB)
    first.close()
    second.close()


def test_what_is_held_beyond_a_lower_limit_stays_until_it_is_idle(arena):
    buffer = arena.allocate(32 * MiB)
    arena.set_limit(4 * MiB)
    memoryview(buffer)[-1] = 7
    assert arena.stats().reserved >= 32 * MiB
    buffer.close()
    arena.shrink()
    assert arena.stats().reserved == 0
    arena.allocate(2 * MiB).close()
    assert arena.stats().reserved <= 4 * MiB


@pytest.mark.parametrize("limit", [-1, 1.5, "1GiB", None])
def test_a_limit_that_is_no_size_is_refused_and_changes_nothing(arena, limit):
    arena.set_limit(8 * MiB)
    with pytest.raises((TypeError, ValueError)):
        arena.set_limit(limit)
    assert arena.stats().limit == 8 * MiB


def test_a_closed_arena_takes_no_limit(arena):
    arena.close()
    with pytest.raises(ClosedError):
        arena.set_limit(MiB)


def test_peaks_begin_anew_from_what_is_there_now(arena):
    kept = arena.allocate(MiB)
    arena.allocate(16 * MiB).close()
    assert arena.stats().max_in_use >= 17 * MiB
    arena.shrink()
    arena.reset_peaks()
    stats = arena.stats()
    assert (stats.max_in_use, stats.max_reserved) == (stats.in_use, stats.reserved)
    arena.allocate(2 * MiB).close()
    assert arena.stats().max_in_use == stats.in_use + 2 * MiB
    kept.close()

"""Small and large blocks have address ranges of their own: idle pages of one serve the other."""

import pytest

import gpumem

KIB, MIB = 1 << 10, 1 << 20
SMALL = 64 * KIB
TIGHT = {"backing": "virtual", "page_move_threshold": 0.0075}


def blocks_of(arena, nbytes, size, stream=None):
    return [arena.allocate(size, stream) for _ in range(nbytes // size)]


@pytest.fixture
def in_two_ranges(make_arena):
    """Make arenas whose small blocks have their own range, because 64 MiB are in use."""
    pins = []

    def make(**settings):
        arena = make_arena(TIGHT | settings)
        pins.extend(blocks_of(arena, 64 * MIB, MIB))
        pins.append(arena.allocate(SMALL))
        return arena

    yield make
    pins.clear()


@pytest.mark.parametrize(("before", "after"), [(MIB, SMALL), (SMALL, MIB)])
@pytest.mark.parametrize("same_stream", [True, False])
def test_pages_that_one_range_left_idle_serve_the_other(in_two_ranges, before, after, same_stream):
    arena = in_two_ranges()
    blocks_of(arena, 80 * MIB, before)  # and freed again
    most = arena.stats().reserved
    held = blocks_of(arena, 60 * MIB, after, None if same_stream else gpumem.Stream("host"))
    assert arena.stats().max_reserved <= most + 2 * MIB
    assert len({block.ptr for block in held}) == len(held)
    arena.check_invariants()


def test_idle_pages_larger_than_what_is_missing_go_back_too(make_arena):
    arena = make_arena(TIGHT)
    arena.allocate(2048 * MIB).close()
    most = arena.stats().reserved
    held = blocks_of(arena, 24 * MIB, SMALL)
    assert arena.stats().max_reserved <= 1.0075 * most
    assert len({block.ptr for block in held}) == len(held)
    arena.check_invariants()


def test_idle_pages_stay_while_their_work_is_not_done(in_two_ranges, virtual_clock):
    arena = in_two_ranges()
    virtual_clock.set_lag(10**9)
    side = gpumem.Stream("host")
    blocks_of(arena, 80 * MIB, MIB, side)
    most = arena.stats().reserved
    held = blocks_of(arena, 8 * MIB, SMALL)
    assert arena.stats().reserved == most + 8 * MIB
    held.clear()
    virtual_clock.advance_clock(10**9)


def test_without_time_for_moves_idle_pages_of_the_other_range_stay(in_two_ranges):
    arena = in_two_ranges(page_move_budget=0)
    blocks_of(arena, 80 * MIB, MIB)
    most = arena.stats().reserved
    held = blocks_of(arena, 8 * MIB, SMALL)
    assert arena.stats().reserved >= most + 6 * MIB
    held.clear()

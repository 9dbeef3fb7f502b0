"""Address ranges of paged arenas: how large each is, and when another one is reserved."""

from __future__ import annotations

import gc

import pytest

import gpumem
from gpumem._testing.arenas import release_retired

MIB, GIB = 1 << 20, 1 << 30
GRANULE = 2 * MIB  # behind each range, so that no two of them touch
OUT_OF_MEMORY = 2


@pytest.fixture
def arena(make_arena, host):
    host.set_capacity(0, 1 << 44)  # no byte is touched: the host may pretend to have them
    return make_arena({"backing": "virtual"})


def ranges(arena):
    (found,) = arena.snapshot().resources
    return [region.nbytes + GRANULE for region in found.regions if region.kind == "range"]


def test_first_range_is_of_16_gib(arena):
    with arena.allocate(MIB):
        assert ranges(arena) == [16 * GIB]


def test_block_beyond_the_first_range_has_one_of_its_size(arena):
    with arena.allocate(20 * GIB - 100):
        assert ranges(arena) == [20 * GIB + GRANULE]


def test_further_range_is_larger_than_all_before_it(arena):
    held = [arena.allocate(10 * GIB)]
    assert ranges(arena) == [16 * GIB]
    held.append(arena.allocate(10 * GIB))
    assert ranges(arena) == [16 * GIB, 32 * GIB]
    held += [arena.allocate(20 * GIB), arena.allocate(30 * GIB)]
    assert ranges(arena) == [16 * GIB, 32 * GIB, 64 * GIB]
    arena.check_invariants()
    for block in held:
        block.close()


def test_block_as_large_as_a_range_fills_it(arena):
    whole = arena.allocate(16 * GIB - GRANULE)
    assert ranges(arena) == [16 * GIB]
    with arena.allocate(2 * GRANULE) as beside:
        assert ranges(arena) == [16 * GIB, 32 * GIB]
        assert not whole.ptr <= beside.ptr < whole.ptr + whole.nbytes
    arena.check_invariants()
    whole.close()


def test_range_that_is_smaller_than_the_one_before_it_has_pages_of_its_own(arena, host):
    whole = arena.allocate(16 * GIB - GRANULE)
    host.fail("cuMemAddressReserve", 1, OUT_OF_MEMORY, 7)
    beside = [arena.allocate(2 * GRANULE) for _ in range(3)]
    assert ranges(arena) == [16 * GIB, 256 * MIB]
    arena.check_invariants()
    whole.close()
    arena.shrink()
    assert arena.stats().reserved == 6 * GRANULE
    arena.check_invariants()
    for block in beside:
        block.close()
    arena.shrink()
    assert arena.stats().reserved == 0


def test_refused_range_is_halved_until_the_block_fits(arena, host):
    host.fail("cuMemAddressReserve", 1, OUT_OF_MEMORY, 3)
    before = host.call_count("cuMemAddressReserve")
    with arena.allocate(MIB):
        assert ranges(arena) == [2 * GIB]
        assert host.call_count("cuMemAddressReserve") - before == 4


def test_range_is_refused_once_it_would_not_hold_the_block(arena, host):
    host.fail("cuMemAddressReserve", 1, OUT_OF_MEMORY, 0)
    before = host.call_count("cuMemAddressReserve")
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(3 * GIB)
    # 16, 8, 4 GiB, what the block needs; once more after idle memory was given back.
    assert host.call_count("cuMemAddressReserve") - before in (4, 8)
    host.clear_faults()
    host.fail("cuMemAddressReserve", 1, OUT_OF_MEMORY, 3)
    with arena.allocate(3 * GIB):
        assert ranges(arena) == [3 * GIB + GRANULE]


@pytest.mark.parametrize("error", [1, OUT_OF_MEMORY])
def test_refused_further_range_leaves_the_arena_as_it_was(arena, host, error):
    held = arena.allocate(10 * GIB)
    before = arena.stats(), ranges(arena)
    host.fail("cuMemAddressReserve", 1, error, 0)
    with pytest.raises((gpumem.OutOfMemoryError, gpumem.errors.DriverError)):
        arena.allocate(10 * GIB)
    after = arena.stats()
    assert (after.in_use, after.reserved, after.num_allocs) == (
        before[0].in_use,
        before[0].reserved,
        before[0].num_allocs,
    )
    assert ranges(arena) == before[1]
    host.clear_faults()
    with arena.allocate(10 * GIB):
        assert ranges(arena) == [16 * GIB, 32 * GIB]
    held.close()


def test_addresses_of_every_range_go_back(host):
    host.set_capacity(0, 1 << 44)
    gc.collect()
    release_retired()
    before = host.live()
    arena = gpumem.Arena("host", {"backing": "virtual"})
    held = [arena.allocate(10 * GIB) for _ in range(3)]
    assert host.live()["reservations"] == before["reservations"] + 2
    for block in held:
        block.close()
    del block, held, arena
    release_retired()
    after = host.live()
    for kind in ("reservations", "handles", "mappings"):
        assert after[kind] == before[kind]

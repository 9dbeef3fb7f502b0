"""When a paged arena asks the device, and when small blocks get a range of their own."""

from __future__ import annotations

from collections import Counter

import pytest

import gpumem
from gpumem import observe

KIB, MIB = 1 << 10, 1 << 20
VIRTUAL = {"backing": "virtual"}


def page_sizes(arena):
    """Return the sizes of all pages, in MiB, sorted."""
    (found,) = arena.snapshot().resources
    return sorted(int(nbytes) // MIB for _, nbytes in found.pages)


@pytest.mark.parametrize(("size", "ranges"), [(2 * MIB, 2), (2 * MIB - 2048, 1)])
def test_small_blocks_have_their_own_range_once_64_mib_are_in_use(make_arena, size, ranges):
    arena = make_arena(VIRTUAL)
    held = [arena.allocate(62 * MIB), arena.allocate(size), arena.allocate(1000)]
    assert len({block.region for block in arena.blocks()}) == ranges
    for block in held:
        block.close()


def test_block_of_256_kib_is_not_a_small_one(make_arena):
    arena = make_arena(VIRTUAL)
    held = [arena.allocate(64 * MIB), arena.allocate(256 * KIB), arena.allocate(256 * KIB - 256)]
    found = {block.address: block.region for block in arena.blocks()}
    regions = [found[block.ptr] for block in held]
    assert regions[0] == regions[1] != regions[2]
    for block in held:
        block.close()


@pytest.mark.parametrize(("size", "asked"), [(256 * MIB, 1), (256 * MIB - 256, 0)])
def test_free_memory_is_asked_for_from_256_mib_on(make_arena, host, size, asked):
    arena = make_arena(VIRTUAL)
    before = host.call_count("cuMemGetInfo")
    with arena.allocate(size):
        assert host.call_count("cuMemGetInfo") - before == asked


def test_block_beyond_free_and_idle_memory_makes_no_page(make_arena, host, leave_room):
    arena = make_arena(VIRTUAL)
    pin = arena.allocate(2 * MIB)
    arena.allocate(100 * MIB).close()
    leave_room(200 * MIB)
    made = host.call_count("cuMemCreate")
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(300 * MIB + 256)
    assert host.call_count("cuMemCreate") == made
    with arena.allocate(300 * MIB):
        assert arena.stats().reserved == 302 * MIB
    pin.close()


@pytest.mark.parametrize(
    ("size", "pages"),
    [
        (16 * MIB, [2] * 8),
        (224 * MIB - 256, [2] * 112),
        (224 * MIB, [4] * 56),
        (448 * MIB, [8] * 56),
        (1792 * MIB, [32] * 56),
    ],
)
def test_block_that_is_most_of_the_live_peak_has_pages_of_a_56th_of_it(make_arena, size, pages):
    arena = make_arena(VIRTUAL)
    with arena.allocate(size):
        assert page_sizes(arena) == pages


@pytest.mark.parametrize(("size", "pages"), [(256 * MIB - 256, [16] * 16), (256 * MIB, [32] * 8)])
def test_pages_of_32_mib_are_made_only_for_blocks_of_eight(make_arena, size, pages):
    arena = make_arena(VIRTUAL)
    peak = arena.allocate(7 << 30)
    assert page_sizes(arena) == [32] * 224
    block = arena.allocate(size)
    assert page_sizes(arena) == sorted(pages + [32] * 224)
    for each in (block, peak):
        each.close()


def test_pages_grow_with_the_live_peak(make_arena):
    # A page is at most a 224th of it: 4 MiB from 896 MiB on.
    arena = make_arena(VIRTUAL)
    held = [arena.allocate(4 * MIB) for _ in range(225)]
    sizes = page_sizes(arena)
    assert sizes.count(2) == 2 * 223
    assert sizes.count(4) == 2
    small = arena.allocate(1000)
    assert page_sizes(arena).count(2) == 2 * 223 + 1, "small blocks' pages stay small"
    for block in [*held, small]:
        block.close()


@pytest.mark.parametrize(
    ("limit", "size", "largest"), [(0, 48, 16), (8, 48, 4), (8, 96, 8), (8, 8, 4), (8, 512, 32)]
)
def test_block_below_a_limit_has_at_least_eight_pages(make_arena, limit, size, largest):
    arena = make_arena(VIRTUAL | {"max_mem": limit << 30})
    held = [arena.allocate(7 << 30)]  # a 224th of it is a page of 32 MiB
    before = Counter(page_sizes(arena))
    held.append(arena.allocate(size * MIB))
    assert max(Counter(page_sizes(arena)) - before) == largest
    for block in held:
        block.close()


@pytest.mark.parametrize("room", [None, 62, 64])
def test_pages_beyond_the_share_have_2_mib(make_arena, room):
    # Each of 64 pages of 32 MiB holds a part of a block, so that none can move.
    limit = 0 if room is None else (2048 + room) * MIB
    arena = make_arena(VIRTUAL | {"page_move_threshold": 0, "max_mem": limit, "oom_wait_ms": 0})
    arena.allocate(2048 * MIB).close()
    blocks = [arena.allocate(size * MIB) for size in [31] * 66 + [2]]
    for block in blocks[:66:2]:
        block.close()
    if limit:
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(room * MIB + 256)
    assert page_sizes(arena) == [32] * 64
    wanted = room or 64
    blocks.append(arena.allocate(wanted * MIB))
    assert page_sizes(arena) == [2] * (wanted // 2) + [32] * 64
    for block in blocks:
        block.close()


def test_pages_are_made_one_by_one_as_blocks_come(make_arena):
    arena = make_arena(VIRTUAL)
    with observe.record(arena) as recording:
        held = [arena.allocate(size * MIB) for size in (1, 1, 1, 3, 2)]
    made = [event for event in recording.events() if event.action == "reserve"]
    assert [event.nbytes for event in made] == [2 * MIB] * 4
    assert [event.address - made[0].address for event in made] == [0, 2 * MIB, 4 * MIB, 6 * MIB]
    assert arena.stats().reserved == 8 * MIB
    for block in held:
        block.close()

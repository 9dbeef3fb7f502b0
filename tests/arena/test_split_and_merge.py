"""What a block leaves of the free chunk it is cut from, and how freed neighbours become one."""

import itertools

import pytest

KIB, MIB = 1 << 10, 1 << 20
ARENA_CONFIG = {"backing": "regions", "split_rule": "tight"}


def one_chunk(make_arena, chunk, **config):
    """Make an arena whose first request finds one free chunk of that size."""
    return make_arena({"initial_chunk_size_bytes": chunk, **config})


@pytest.mark.parametrize(
    ("chunk", "request_bytes", "block"),
    [
        (1 * MIB, 600 * KIB, 1 * MIB),
        (1 * MIB, 512 * KIB, 512 * KIB),
        (1 * MIB, 512 * KIB + 1, 1 * MIB),
        (190 * MIB, 100 * MIB, 190 * MIB),
        (300 * MIB, 160 * MIB, 160 * MIB),
        (228 * MIB, 100 * MIB, 100 * MIB),
        (512, 256, 256),
        (512, 257, 512),
    ],
)
def test_ort_rule_splits_at_twice_the_request_or_max_dead_bytes_left(
    make_arena, chunk, request_bytes, block
):
    arena = one_chunk(make_arena, chunk, split_rule="ort")
    assert arena.allocate(request_bytes).allocated_nbytes == block


@pytest.mark.parametrize(("dead", "block"), [(100 * KIB, 924 * KIB), (100 * KIB + 1, MIB)])
def test_ort_rule_leaves_less_than_max_dead_bytes_unused(make_arena, dead, block):
    arena = one_chunk(make_arena, MIB, split_rule="ort", max_dead_bytes_per_chunk=dead)
    assert arena.allocate(924 * KIB).allocated_nbytes == block


@pytest.mark.parametrize("request_bytes", [1, 256, 257, 600 * KIB, MIB - 256, MIB])
def test_tight_rule_splits_off_every_remainder(make_arena, request_bytes):
    arena = one_chunk(make_arena, MIB, split_rule="tight")
    buffer = arena.allocate(request_bytes)
    assert buffer.allocated_nbytes == -(-request_bytes // 256) * 256
    assert arena.stats().largest_free == MIB - buffer.allocated_nbytes


def free_blocks(arena):
    return [(block.address, block.allocated_nbytes) for block in arena.blocks() if not block.used]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_freed_neighbours_merge_in_any_order(make_arena, order):
    arena = one_chunk(make_arena, MIB, split_rule="tight")
    buffers = [arena.allocate(100 * KIB) for _ in range(3)]
    start = buffers[0].ptr
    for index in order:
        buffers[index].close()
    assert free_blocks(arena) == [(start, MIB)]


def test_cached_small_blocks_merge_too(make_arena, rng):
    arena = one_chunk(make_arena, MIB, split_rule="tight")
    buffers = [arena.allocate(rng.choice([256, 512, 4096])) for _ in range(200)]
    start = buffers[0].ptr
    rng.shuffle(buffers)
    while buffers:
        buffers.pop().close()
    assert free_blocks(arena) == [(start, MIB)]


def test_whole_free_region_is_reused_from_its_first_address(make_arena):
    arena = one_chunk(make_arena, MIB, split_rule="tight")
    buffers = [arena.allocate(size) for size in (256, 70 * KIB, 1000, 100 * KIB)]
    start = buffers[0].ptr
    buffers.clear()
    whole = arena.allocate(MIB)
    assert (whole.ptr, arena.stats().num_extensions) == (start, 1)


def test_blocks_of_two_regions_never_merge(make_arena):
    arena = make_arena({"extend_strategy": "same_as_requested"})
    buffers = [arena.allocate(2 * MIB) for _ in range(8)]
    del buffers
    assert [nbytes for _, nbytes in free_blocks(arena)] == [2 * MIB] * 8


def test_best_fitting_chunk_is_allocated(make_arena):
    arena = one_chunk(make_arena, 8 * MIB, split_rule="tight")
    sizes = [700 * KIB, 200 * KIB, 400 * KIB]
    held, walls = [], []
    for size in sizes:
        held.append(arena.allocate(size))
        walls.append(arena.allocate(256))
    addresses = [buffer.ptr for buffer in held]
    held.clear()
    assert arena.allocate(390 * KIB).ptr == addresses[2]
    del walls


def test_freed_block_is_the_next_of_its_size(arena):
    with arena.allocate(5000) as first:
        address = first.ptr
    assert arena.allocate(5000).ptr == address

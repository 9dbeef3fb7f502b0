"""The pool of blocks of examples/paged_server: which blocks it allocates, whole pages released."""

import numpy as np
import pytest
from helpers.examples import add_example

from gpumem.errors import InUseError, OutOfMemoryError

add_example("paged_server")

from block_pool import BlockPool  # noqa: E402

MIB = 1 << 20


def pool_of(arena, blocks=64):
    """Make a pool of four blocks a page."""
    return BlockPool(arena.virtual((blocks, MIB // 2), "uint8", step=1))


def test_blocks_are_rows_with_memory(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(5)
    assert (pool.group_blocks, pool.live, pool.tensor.rows) == (4, 5, ((0, 8),))
    pool.tensor.full.numpy()[blocks] = 1
    assert pool.tensor.held_nbytes == pool.floor_nbytes == 4 * MIB
    pool.free(blocks)
    assert (pool.live, pool.tensor.held_nbytes, pool.floor_nbytes) == (0, 0, 0)


def test_group_is_a_whole_number_of_pages(arena):
    rows = [arena.virtual((64, size), "uint8", step=1) for size in (MIB, 3 * MIB, 3 * MIB // 2)]
    assert [BlockPool(each).group_blocks for each in rows] == [2, 2, 4]


def test_blocks_of_a_sequence_stay_together(arena):
    pool = pool_of(arena)
    first, second = pool.allocate(5), pool.allocate(6)
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.tolist() == [8, 9, 10, 11, 5, 6]  # a group of its own, and room that is left
    assert pool.allocate(2, near=second).tolist() == [7, 12]
    pool.free(second[:2])
    assert pool.allocate(2, near=[10]).tolist() == [8, 9]


def test_begun_groups_are_filled_from_the_lowest(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(12)
    pool.free(blocks[[1, 2, 5]])
    assert pool.allocate(1).tolist() == [1]
    assert pool.allocate(3).tolist() == [2, 5, 12]


def test_begun_groups_are_filled_where_memory_for_empty_ones_is_refused(make_arena):
    pool = pool_of(make_arena({"max_mem": 6 * MIB, "oom_wait_ms": 0}))
    blocks = pool.allocate(12)
    pool.free(blocks[[1, 5, 6, 9]])
    assert pool.allocate(4).tolist() == [1, 5, 6, 9]
    with pytest.raises(OutOfMemoryError):
        pool.allocate(1)
    assert (pool.live, pool.tensor.rows) == (12, ((0, 12),))


def test_refused_memory_changes_nothing(make_arena):
    pool = pool_of(make_arena({"max_mem": 6 * MIB, "oom_wait_ms": 0}))
    pool.free(pool.allocate(12)[:8])  # the last group of three is left
    with pytest.raises(OutOfMemoryError):
        pool.allocate(12)  # a run of groups before it, which gets memory, and one behind it
    assert (pool.live, pool.tensor.rows) == (4, ((8, 12),))
    assert pool.allocate(8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_more_blocks_than_there_are_is_refused(arena):
    pool = pool_of(arena, blocks=10)
    blocks = pool.allocate(10)
    assert sorted(blocks) == list(range(10))  # the last group is short
    with pytest.raises(OutOfMemoryError, match="1 blocks are requested: 10 of 10 are live"):
        pool.allocate(1)
    pool.free(blocks[8:])
    assert pool.tensor.rows == ((0, 8),)


def test_shared_block_is_kept_until_its_last_reference_is_dropped(arena):
    pool = pool_of(arena)
    prefix = pool.allocate(4)
    pool.share(prefix[:2])
    pool.free(prefix)
    assert pool.references[prefix].tolist() == [1, 1, 0, 0]
    for wrong in ([2], [1, 1]):
        with pytest.raises(ValueError, match="references"):
            pool.free(wrong)
    with pytest.raises(ValueError, match="block 3 has 0 references"):
        pool.share([1, 3])
    assert pool.references[prefix].tolist() == [1, 1, 0, 0]
    pool.free(prefix[:2])
    assert pool.tensor.held_nbytes == 0


def test_group_with_a_live_tensor_keeps_its_memory_until_a_later_call(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(8)
    view = pool.tensor.tensor(0, 2)
    with pytest.raises(InUseError):
        pool.free(blocks)
    assert (pool.live, pool.tensor.rows) == (0, ((0, 8),))
    del view
    pool.free([])
    assert pool.tensor.held_nbytes == 0


def test_compaction_reaches_the_floor_and_keeps_bytes(arena, rng):
    pool = pool_of(arena)
    rows = pool.tensor.full.numpy()
    blocks = pool.allocate(40).tolist()
    rows[blocks, 0] = blocks
    gone = rng.sample(blocks, 23)
    pool.free(gone)
    kept = [block for block in blocks if block not in gone]
    shared = rng.choice(kept)
    pool.share([shared])

    def copy(origins, targets):
        rows[targets] = rows[origins]

    moved = pool.compact(copy)
    assert pool.tensor.held_nbytes == pool.floor_nbytes == 5 * 2 * MIB
    assert pool.references[moved.get(shared, shared)] == 2
    assert [rows[moved.get(block, block), 0] for block in kept] == kept
    assert pool.compact(copy) == {}


def test_copy_that_fails_moves_nothing(arena):
    pool = pool_of(arena)
    pool.free(pool.allocate(8)[[0, 1, 6, 7]])

    def fail(origins, targets):
        raise LookupError

    before = pool.references.copy()
    with pytest.raises(LookupError):
        pool.compact(fail)
    assert np.array_equal(pool.references, before)

"""BlockPool: numbers of blocks over virtual tensors, whole pages freed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.interrupting import interrupted, more_calls
from helpers.waiting import wait_until, without_waiting

import gpumem
from gpumem.errors import InUseError, OutOfMemoryError
from gpumem.kv import BlockPool

KIB, MIB = 1 << 10, 1 << 20
INVALID_VALUE = 1
HOUR_MS = 3_600_000


def pool_of(arena, blocks=64, row=512 * KIB, tensors=2, **settings):
    """Make a pool of four blocks a page."""
    made = [arena.virtual((blocks, row), "uint8", step=1, name=str(n)) for n in range(tensors)]
    return BlockPool(made, **settings)


def test_blocks_are_rows_with_memory_in_every_tensor(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(5)
    assert (pool.group_blocks, pool.capacity, pool.block_nbytes) == (4, 64, MIB)
    assert pool.live == 5
    for tensor in pool.tensors:
        assert tensor.rows == ((0, 8),)
        tensor.full[: blocks.max() + 1].numpy()[blocks] = 1
    assert pool.held_nbytes == pool.floor_nbytes == 8 * MIB
    pool.free(blocks)
    assert (pool.live, pool.held_nbytes, pool.floor_nbytes) == (0, 0, 0)


def test_lowest_groups_are_filled_first(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(12)  # groups of 0, 4 and 8
    pool.free(blocks[[1, 2, 5]])
    assert pool.allocate(1).tolist() == [1]
    assert pool.allocate(3).tolist() == [2, 5, 12]
    assert pool.held_nbytes == 16 * MIB


def test_blocks_of_a_sequence_stay_together(arena):
    pool = pool_of(arena)
    first, second = pool.allocate(5), pool.allocate(6)
    assert second.tolist() == [8, 9, 10, 11, 5, 6]  # a group of its own, and what is left
    pool.free(second[:2])
    assert pool.allocate(2, near=second).tolist() == [7, 8]
    assert pool.allocate(2, near=[*first, 10]).tolist() == [9, 12]
    with pytest.raises(ValueError, match="invalid block = 64: expected 0 to 63"):
        pool.allocate(1, near=[64])
    with pytest.raises(TypeError, match="expected integers"):
        pool.allocate(1, near="x")
    assert pool.live == 13


def test_whole_groups_are_taken_only_where_memory_is_free(make_arena):
    arena = make_arena({"max_mem": 16 * MIB, "oom_wait_ms": HOUR_MS})
    pool, other = pool_of(arena), arena.virtual((64, MIB), "uint8", step=2, committed=4)
    other.on_pressure = lambda tensor, nbytes: other.release(0, 4)
    begun = pool.allocate(9)  # 12 MiB of 12
    pool.free(begun[[1, 5, 6]])
    # Of the last three groups, two have room: nobody is asked for memory.
    before = arena.stats().driver_calls
    assert pool.allocate(4).tolist() == [1, 5, 6, 9]
    assert arena.stats().driver_calls == before
    assert (other.rows, pool.held_nbytes) == (((0, 4),), 12 * MIB)
    pool.free(begun[[1, 5, 6]])
    other.release(0, 4)
    assert pool.allocate(4).tolist() == [12, 13, 14, 15]
    other.on_pressure = None  # it has this frame


def test_whole_groups_are_not_waited_for(host, full_pool):
    pool, gate = full_pool
    held = pool.allocate(8)  # all that there is for now
    pool.free(held[[0, 1, 4, 5]])
    waits = more_calls(host, "cuEventQuery", 20)
    thread, results = run(lambda: pool.allocate(9))
    with without_waiting(gate):
        wait_until(waits)
        assert pool.allocate(4).tolist() == [0, 1, 4, 5]
        assert not results
    gate.open()
    pool.free(held)
    ends(thread)
    assert len(results[0]) == 9


def test_one_commit_and_one_release_for_what_belongs_together(arena):
    pool = pool_of(arena, tensors=1)
    before = arena.stats().driver_calls
    blocks = pool.allocate(16)
    assert arena.stats().driver_calls - before == 4 + 4 + 1
    before = arena.stats().driver_calls
    pool.free(blocks[4:])
    # An event and its query, one unmap, and three handles.
    assert arena.stats().driver_calls - before <= 2 + 1 + 3
    assert pool.tensors[0].rows == ((0, 4),)


def test_group_is_whole_pages_of_every_tensor(arena):
    rows = [arena.virtual((64, size), "uint8", step=1) for size in (MIB, 512 * KIB, 3 * MIB)]
    assert BlockPool(rows).group_blocks == 4  # 2, 4 and 2 blocks fill pages of 2 MiB
    assert BlockPool(rows, block_rows=2).group_blocks == 2
    assert BlockPool(rows, block_rows=3).capacity == 21


def test_last_group_may_be_short(arena):
    pool = pool_of(arena, blocks=10)
    blocks = pool.allocate(10)
    assert sorted(blocks) == list(range(10))
    with pytest.raises(OutOfMemoryError, match="10 blocks lacks 1 of those asked for: 10 are live"):
        pool.allocate(1)
    pool.free(blocks[8:])
    assert pool.tensors[0].rows == ((0, 8),)
    assert sorted(pool.allocate(2)) == [8, 9]


def test_spare_groups_keep_their_memory(arena):
    pool = pool_of(arena, spare=1)
    pool.free(pool.allocate(12))
    assert pool.held_nbytes == 4 * MIB
    pool.trim()
    assert pool.held_nbytes == 0


def test_relieve_gives_spare_groups_back_and_evicts_only_for_the_rest(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    pool = pool_of(arena, spare=1)
    pool.tensors[0].on_pressure = lambda tensor, nbytes: pool.relieve(nbytes)
    group = pool.group_blocks * pool.block_nbytes
    blocks = pool.allocate(16)
    pool.free(blocks, cache=True)
    with arena.allocate(group):
        assert (pool.cached, pool.held_nbytes) == (16 - pool.group_blocks, 16 * MIB - group)
    pool.tensors[0].on_pressure = None
    pool.evict(pool.group_blocks)
    assert pool.held_nbytes == 16 * MIB - group
    cached = pool.cached
    assert pool.relieve(group) == group
    assert (pool.cached, pool.held_nbytes) == (cached, 16 * MIB - 2 * group)
    assert pool.relieve(2 * group) == 2 * group
    assert pool.cached == cached - 2 * pool.group_blocks


def test_references_keep_shared_blocks(arena):
    pool = pool_of(arena)
    prefix = pool.allocate(4)
    pool.share(prefix[:2])
    pool.free(prefix)
    assert pool.references(prefix).tolist() == [1, 1, 0, 0]
    pool.share([0, 0])
    pool.free([0, 0, 0])
    assert pool.live == 1
    for wrong in ([0], [1, 1], [64], [-1]):
        with pytest.raises(ValueError, match="block"):
            pool.free(wrong)
    with pytest.raises(ValueError, match="block 3 cannot be shared"):
        pool.share([1, 3])
    assert pool.references(range(4)).tolist() == [0, 1, 0, 0]


def test_cached_blocks_come_back_or_are_evicted(arena):
    evicted = []
    pool = pool_of(arena, blocks=8, on_evict=lambda blocks: evicted.extend(blocks.tolist()))
    blocks = pool.allocate(8)
    pool.free(blocks[:6], cache=True)
    pool.share(blocks[:1])
    assert (pool.live, pool.cached) == (3, 5)
    more = pool.allocate(3)
    assert (pool.live, pool.cached, len(evicted)) == (6, 2, 3)
    assert sorted(more) == sorted(evicted)
    with pytest.raises(OutOfMemoryError):
        pool.allocate(3)
    assert pool.references(more).tolist() == [1, 1, 1]


def test_eviction_frees_whole_groups_first(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(12)
    pool.free(blocks[[0, 1, 2]], cache=True)  # the oldest, beside a live one
    pool.free(blocks[[4, 5, 6, 7]], cache=True)
    pool.free(blocks[[8, 9, 10]], cache=True)
    pool.free(blocks[[11]])
    assert pool.eviction_order().tolist() == [8, 9, 10, 4, 5, 6, 7, 0, 1, 2]
    held = pool.held_nbytes
    assert pool.relieve(3 * MIB) == 4 * MIB
    assert pool.held_nbytes == held - 4 * MIB


def test_compaction_reaches_the_floor_and_keeps_bytes(arena, rng):
    pool = pool_of(arena)
    blocks = pool.allocate(40).tolist()
    for tensor in pool.tensors:
        for block in blocks:
            tensor.full[block].numpy()[:8] = block
    gone = rng.sample(blocks, 23)
    pool.free(gone)
    kept = {block: block for block in blocks if block not in gone}
    shared = rng.choice(list(kept))
    pool.share([shared])
    moves = pool.compact()
    for origin, target in moves.tolist():
        for tensor in pool.tensors:
            tensor.full[target].numpy()[:] = tensor.full[origin].numpy()
    pool.moved(moves)
    where = dict(moves.tolist())
    assert pool.held_nbytes == pool.floor_nbytes == 5 * 4 * MIB
    assert pool.references([where.get(shared, shared)]).tolist() == [2]
    for tag, block in kept.items():
        for tensor in pool.tensors:
            assert (tensor.full[where.get(block, block)].numpy()[:8] == tag).all()
    assert len(pool.compact()) == 0


def test_block_that_is_freed_too_often_is_named(arena):
    pool = pool_of(arena)
    block, other = pool.allocate(2)
    with pytest.raises(ValueError, match=f"block {block} is freed 2 times, but has 1 reference"):
        pool.free([other, block, block])
    assert pool.live == 2
    pool.free([block, other])


def test_blocks_freed_during_a_compaction_are_not_moved(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(8)
    pool.free(blocks[[0, 1, 6, 7]])  # 2 and 3, 4 and 5 are left
    moves = pool.compact()
    assert moves.tolist() == [[4, 0], [5, 1]]
    pool.free([5])
    assert len(pool.compact()) == 0  # nothing moves twice
    pool.moved(moves)
    assert pool.live == 3
    assert pool.tensors[0].rows == ((0, 4),)
    assert pool.allocate(1).tolist() == [1]
    with pytest.raises(ValueError, match="cannot be moved to"):
        pool.moved(moves)


def test_number_that_is_handed_out_anew_is_not_moved(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(8)
    pool.free(blocks[[0, 1, 6, 7]])
    moves = pool.compact()
    assert moves.tolist() == [[4, 0], [5, 1]]
    pool.free([4], cache=True)
    assert pool.evict(1).tolist() == [4]
    pool.free([5])
    new = pool.allocate(4).tolist()
    assert {4, 5} < set(new)
    pool.moved(moves[:1])
    assert pool.references(new).tolist() == [1] * 4
    assert pool.allocate(1).tolist() == [0]
    pool.moved(moves[1:])
    assert pool.references(new).tolist() == [1] * 4
    assert pool.live == 7


def test_block_is_moved_by_the_plan_of_its_present_owner(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(8)
    pool.free(blocks[[0, 1, 5, 6, 7]])
    old = pool.compact()
    assert old.tolist() == [[4, 0]]
    pool.free([4])
    assert pool.allocate(2).tolist() == [1, 4]
    pool.free([1])
    new = pool.compact()
    assert new.tolist() == [[4, 1]]
    pool.moved(old)
    assert pool.references([0, 1, 4]).tolist() == [0, 0, 1]
    pool.moved(new)
    assert pool.references([0, 1, 4]).tolist() == [0, 1, 0]


def test_blocks_are_cached_or_shared_while_they_move(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(8)
    pool.free(blocks[[0, 1, 6, 7]])
    moves = pool.compact()
    pool.free([4], cache=True)
    pool.share([5])
    pool.moved(moves[::-1])  # in any order
    assert pool.references([0, 1]).tolist() == [0, 2]
    assert pool.eviction_order().tolist() == [0]
    assert pool.tensors[0].rows == ((0, 4),)


def test_compaction_keeps_to_its_limit_and_empties_groups_whole(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(12)
    pool.free(blocks[[3, 5, 6, 9, 10, 11]])  # 3, 2 and 1 are left
    assert len(pool.compact(0)) == 0
    moves = pool.compact(1)
    assert moves.tolist() == [[8, 3]]
    pool.moved(moves)
    assert pool.tensors[0].rows == ((0, 8),)


# ---- threads and callbacks -----------------------------------------------------------------------


def run(call):
    """Run it in a thread; what it returns comes into the list."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def ends(thread):
    """Wait for a thread, which may be stuck."""
    wait_until(lambda: not thread.is_alive(), 30)


@pytest.fixture
def full_pool(host, make_arena):
    """A pool of 16 MiB at most, of which 8 are left behind work that a gate holds."""
    arena, stream = make_arena({"max_mem": 16 * MIB, "oom_wait_ms": HOUR_MS}), gpumem.Stream("host")
    other = arena.virtual((8, MIB), "uint8", step=2, committed=8, stream=stream)
    pool = pool_of(arena)
    with HostDriver().block(stream) as gate:
        HostDriver().fill(other.tensor(0, 1), 1, stream)
        other.release(0, 8)
        yield pool, gate
    stream.synchronize()
    for tensor in pool.tensors:
        tensor.close()


def test_free_of_another_thread_ends_the_wait_for_memory(host, full_pool):
    pool, gate = full_pool
    held = pool.allocate(8)
    waits = more_calls(host, "cuEventQuery", 20)
    thread, results = run(lambda: pool.allocate(4))
    with without_waiting(gate):
        wait_until(waits)
        pool.free(held[4:])
        ends(thread)
    assert results[0].tolist() == [8, 9, 10, 11]


def test_calls_that_need_no_memory_go_on_while_one_waits_for_it(host, full_pool):
    pool, gate = full_pool
    held = pool.allocate(7)
    waits = more_calls(host, "cuEventQuery", 20)
    thread, results = run(lambda: pool.allocate(5))
    with without_waiting(gate):
        wait_until(waits)
        assert pool.allocate(1).tolist() == [7]
        pool.share(held)
        pool.free(held)
        assert len(pool.compact()) == 0
        pool.trim()
        assert not results
    gate.open()
    ends(thread)
    assert len(results[0]) == 5
    assert pool.live == 13


def test_threads_that_lack_memory_fill_one_group(host, full_pool):
    pool, gate = full_pool
    pool.allocate(8)
    waits = more_calls(host, "cuEventQuery", 20)
    threads = [run(lambda: pool.allocate(1)) for _ in range(4)]
    wait_until(waits)
    gate.open()
    for thread, _ in threads:
        ends(thread)
    assert sorted(int(results[0][0]) for _, results in threads) == [8, 9, 10, 11]
    assert pool.held_nbytes == 12 * MIB


def test_interrupt_ends_the_wait_for_memory(host, full_pool):
    pool, gate = full_pool
    pool.allocate(8)
    before = [tensor.rows for tensor in pool.tensors]
    with interrupted(more_calls(host, "cuEventQuery", 20), gate):
        pool.allocate(4)
    assert [tensor.rows for tensor in pool.tensors] == before
    gate.open()
    assert pool.allocate(4).tolist() == [8, 9, 10, 11]


def test_pools_relieve_each_other_at_the_same_time(make_arena):
    arena = make_arena({"max_mem": 16 * MIB, "oom_wait_ms": 0})
    pools = [pool_of(arena, tensors=1) for _ in range(2)]
    both, told = threading.Barrier(2), set()

    def relieve(pool, nbytes):
        if pool not in told:
            told.add(pool)
            both.wait(30)  # until the commit of either thread has been refused
        return pool.relieve(nbytes)

    for pool in pools:
        pool.free(pool.allocate(16), cache=True)
        pool.tensors[0].on_pressure = lambda tensor, nbytes, pool=pool: relieve(pool, nbytes)
    threads = [run(lambda pool=pool: pool.allocate(12)) for pool in pools]
    for thread, _ in threads:
        ends(thread)
    assert [pool.live for pool in pools] == [12, 12]
    for pool in pools:
        pool.tensors[0].on_pressure = None


def test_engine_may_use_the_pool_while_it_is_told_of_evicted_blocks(make_arena):
    arena = make_arena({"max_mem": 8 * MIB, "oom_wait_ms": 0})
    kept = []

    def forget(blocks):
        with pytest.raises(ValueError, match=f"block {blocks[0]} cannot be shared"):
            pool.share(blocks)
        thread, _ = run(lambda: pool.free([kept.pop()]))
        ends(thread)

    pool = pool_of(arena, on_evict=forget)
    kept.append(int(pool.allocate(8)[0]))
    pool.free(range(1, 8), cache=True)
    assert pool.evict(7).tolist() == [4, 5, 6, 7, 1, 2, 3]
    assert (pool.live, pool.cached, pool.held_nbytes) == (0, 0, 0)
    pool.on_evict = None  # it has this frame


def test_blocks_stay_cached_if_the_engine_refuses_their_eviction(arena):
    def fail(blocks):
        raise LookupError(blocks)

    pool = pool_of(arena, on_evict=fail)
    pool.free(pool.allocate(4), cache=True)
    for call in (lambda: pool.evict(2), lambda: pool.relieve(MIB)):
        with pytest.raises(LookupError):
            call()
        assert (pool.cached, pool.held_nbytes) == (4, 4 * MIB)
    pool.share([0, 1, 2, 3])


# ---- refusals ------------------------------------------------------------------------------------


def test_refused_memory_leaves_all_tensors_as_they_were(host, make_arena):
    arena = make_arena({"max_mem": 12 * MIB, "oom_wait_ms": 0})
    pool = pool_of(arena)
    pool.allocate(6)
    before = [tensor.rows for tensor in pool.tensors], pool.held_nbytes
    with pytest.raises(OutOfMemoryError):
        pool.allocate(12)
    assert ([tensor.rows for tensor in pool.tensors], pool.held_nbytes) == before
    host.fail("cuMemMap", 2, INVALID_VALUE, 0)  # of the second tensor
    with pytest.raises(gpumem.errors.DriverError):
        pool.allocate(4)
    host.clear_faults()
    assert ([tensor.rows for tensor in pool.tensors], pool.held_nbytes) == before
    assert pool.allocate(6).tolist() == [8, 9, 10, 11, 6, 7]


def test_cached_blocks_go_before_memory_is_out(make_arena):
    arena = make_arena({"max_mem": 8 * MIB})
    pool = pool_of(arena)
    first = pool.allocate(8)
    pool.free(first, cache=True)
    assert len(pool.allocate(6)) == 6
    assert pool.cached < 8


def test_pressure_takes_groups_of_cached_blocks(make_arena):
    arena = make_arena({"max_mem": 12 * MIB})
    pool = pool_of(arena)
    blocks = pool.allocate(12)
    pool.free(blocks[2:], cache=True)
    pool.tensors[0].on_pressure = lambda which, nbytes: pool.relieve(nbytes)
    with arena.allocate(5 * MIB):
        assert (pool.held_nbytes, pool.cached) == (4 * MIB, 2)
        assert pool.relieve(MIB) == 0
    pool.tensors[0].on_pressure = None  # it has this frame


def test_pages_leave_behind_the_work_of_their_streams(arena):
    stream = gpumem.Stream("host")
    rows = arena.virtual((16, MIB), "uint8", step=1, stream=stream)
    pool = BlockPool([rows])
    blocks = pool.allocate(4)
    with HostDriver().block(stream):
        HostDriver().fill(rows.tensor(0, 2), 5, stream)
        pool.free(blocks)
        assert (pool.floor_nbytes, pool.held_nbytes) == (0, 4 * MIB)
    stream.synchronize()
    arena.shrink()
    assert pool.held_nbytes == 0


def test_free_of_rows_in_a_live_tensor_changes_nothing(arena):
    pool = pool_of(arena)
    blocks = pool.allocate(5)
    view = pool.tensors[1].tensor(0, 2)
    with pytest.raises(InUseError):
        pool.free(blocks)
    assert pool.references(blocks).tolist() == [1] * 5
    assert [tensor.rows for tensor in pool.tensors] == [((0, 8),)] * 2
    pool.free(blocks[4:])
    del view
    pool.free(blocks[:4])
    assert pool.held_nbytes == 0


def test_evicted_group_with_a_live_view_keeps_its_memory_in_every_tensor(arena):
    pool = pool_of(arena)
    pool.free(pool.allocate(12), cache=True)
    view = pool.tensors[1].tensor(5, 6)
    assert pool.relieve(12 * MIB) == 8 * MIB
    assert [tensor.rows for tensor in pool.tensors] == [((4, 8),)] * 2
    assert pool.allocate(2).tolist() == [4, 5]
    for tensor in pool.tensors:
        tensor.tensor(4, 6).numpy()[:] = 1
    pool.free([4, 5], cache=True)
    pool.evict(2)
    pool.allocate(8)
    pool.free([0, 1, 2, 3])  # of which there is no view
    pool.trim()
    assert pool.tensors[0].rows == ((4, 8),)
    del view
    pool.free([4, 5, 6, 7])
    assert pool.held_nbytes == 0


def test_many_threads_never_share_a_block(arena, rng):
    pool = pool_of(arena, blocks=128, row=256 * KIB)
    seeds = [rng.randrange(1 << 32) for _ in range(4)]
    owners = np.zeros(128, np.int64)
    wrong = []

    def work(number):
        mine = np.random.default_rng(seeds[number])
        for _ in range(100):
            blocks = pool.allocate(int(mine.integers(1, 20)))
            if owners[blocks].any():
                wrong.append(blocks)
            owners[blocks] = number + 1
            if (owners[blocks] != number + 1).any():
                wrong.append(blocks)
            owners[blocks] = 0
            pool.free(blocks)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (pool.live, pool.held_nbytes) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (
            lambda moves: [*moves, *moves],
            ValueError,
            "block 4 cannot be moved to 0: expected pairs",
        ),
        (lambda moves: [[2, 0]], ValueError, "block 2 cannot be moved to 0"),
        (lambda moves: [[0, 0]], ValueError, "block 0 cannot be moved to 0"),
        (lambda moves: [[40, 0]], ValueError, "block 40 cannot be moved to 0"),
        (lambda moves: [*moves, [3, 2]], ValueError, "block 3 cannot be moved to 2"),
        (lambda moves: [[4, 64]], ValueError, "invalid block = 64: expected 0 to 63"),
        (lambda moves: [4, 0], ValueError, r"shape of moves = \(2,\): expected \(moves, 2\)"),
        (lambda moves: [[4, 0, 4]], ValueError, r"shape of moves = \(1, 3\)"),
        (lambda moves: moves + 0.5, TypeError, "4.5.*: expected integers"),
        (lambda moves: [["4", "0"]], TypeError, "'4'.*: expected integers"),
    ],
)
def test_moves_that_were_not_planned_change_nothing(arena, wrong, error, text):
    pool = pool_of(arena)
    blocks = pool.allocate(8)
    pool.free(blocks[[0, 1, 5, 6, 7]])
    moves = pool.compact()
    with pytest.raises(error, match=text):
        pool.moved(wrong(moves))
    assert pool.references(range(8)).tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    pool.moved([])
    pool.moved(moves)
    assert pool.references(range(8)).tolist() == [1, 0, 1, 1, 0, 0, 0, 0]
    assert pool.tensors[0].rows == ((0, 4),)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda pool: pool.allocate(-1), ValueError, "invalid count = -1: expected 0 or more"),
        (lambda pool: pool.allocate(1.5), TypeError, "invalid count = 1.5: expected an integer"),
        (lambda pool: pool.free(["x"]), TypeError, "expected integers"),
        (lambda pool: pool.free([0.5]), TypeError, "expected integers"),
        (lambda pool: pool.free([0], cache=1), TypeError, "invalid cache = 1"),
        (lambda pool: BlockPool([]), ValueError, "at least one"),
        (lambda pool: BlockPool("abc"), TypeError, "invalid tensors = 'a': expected Virtual"),
        (lambda pool: BlockPool([np.zeros((4, 4))]), TypeError, "expected VirtualTensors"),
        (lambda pool: BlockPool(3), TypeError, "invalid tensors = 3: expected VirtualTensors"),
        (lambda pool: BlockPool([*pool.tensors] * 2), ValueError, "'0'.* is there twice"),
        (lambda pool: BlockPool(pool.tensors, block_rows=0), ValueError, "invalid block_rows = 0"),
        (lambda pool: BlockPool(pool.tensors, on_evict=3), TypeError, "invalid on_evict = 3"),
    ],
)
def test_wrong_arguments_are_named(arena, call, error, text):
    with pytest.raises(error, match=text):
        call(pool_of(arena))

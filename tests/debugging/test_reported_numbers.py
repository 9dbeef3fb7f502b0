"""What statistics, snapshots, recordings and budgets say of a debugged arena: its users' view."""

import pytest

import gpumem
from gpumem import observe
from gpumem.observe import snapshot

KIB, MIB = 1 << 10, 1 << 20
GUARDS = 512


def test_blocks_show_the_requested_size(make_arena):
    arena = make_arena(debug_heap=True)
    kept, freed = arena.allocate(1000), arena.allocate(2000)
    freed.close()
    arena.check_heap()  # it rests
    blocks = {block.address: block for block in arena.blocks()}
    live = blocks[kept.ptr - GUARDS // 2]
    assert (live.nbytes, live.allocated_nbytes, live.used, live.pending_free) == (
        1000,
        1024 + GUARDS,
        True,
        False,
    )
    (rests,) = [block for block in blocks.values() if block.pending_free]
    assert (rests.nbytes, rests.allocated_nbytes, rests.used) == (0, 2048 + GUARDS, False)
    assert (
        sum(block.allocated_nbytes for block in blocks.values() if block.used)
        == arena.stats().in_use
    )


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_snapshot_agrees_with_stats_and_shows_the_quarantine(
    make_arena, backing, streams, driver, rng
):
    arena = make_arena({"backing": backing, "split_rule": "tight"}, debug_heap=True)
    live = [arena.allocate(rng.randrange(1, 100_000)) for _ in range(50)]
    for _ in range(20):
        live.pop(rng.randrange(len(live))).close()
    arena.check_heap()
    waits = arena.allocate(5000, streams[0])
    with driver.block(streams[0]):
        waits.close()
        (found,) = snapshot(arena).resources
    stats = arena.stats()
    for key in ("in_use", "requested_in_use", "reserved", "num_allocs", "num_frees"):
        assert found.counts[key] == getattr(stats, key), key
    assert sorted(b.nbytes for b in found.live) == sorted(b.nbytes for b in live)
    assert len([b for b in found.blocks if b.state == "cached"]) == 20
    assert [b.allocated_nbytes for b in found.blocks if b.state == "pending_free"] == [
        5120 + GUARDS
    ]
    for buffer in live:
        buffer.close()


@pytest.mark.parametrize("alignment", [None, 4096])
def test_recording_pairs_each_free_with_its_allocation(make_arena, alignment):
    arena = make_arena(debug_heap=True)
    with observe.record(arena) as recording:
        for nbytes in (1, 1000, 70_000):
            arena.allocate(nbytes, alignment=alignment).close()
            arena.allocate_persistent(nbytes).close()
        arena.check_heap()
        arena.shrink()  # what the heap gives back is no event of its own
    events = [e for e in recording.events() if e.action in ("alloc", "free", "free_requested")]
    assert [e.action for e in events] == ["alloc", "free"] * 6
    for taken, freed in zip(events[::2], events[1::2], strict=True):
        assert (taken.address, taken.nbytes) == (freed.address, freed.nbytes)


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_budget_charge_equals_stats(make_arena, count, rng):
    budget = gpumem.Budget(64 * MIB)
    arena = make_arena(debug_heap=True, budget=budget, count=count)
    live = []
    for _ in range(300):
        if rng.random() < 0.6:
            live.append(arena.allocate(rng.randrange(1, 200_000)))
        elif live:
            live.pop(rng.randrange(len(live))).close()
        stats = arena.stats()
        assert budget.used == (stats.reserved if count == "reserved" else stats.in_use)
    live.clear()
    arena.check_heap()
    arena.shrink()
    assert budget.used == arena.stats().in_use == 0


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_quarantine_is_released_before_a_budget_refuses(make_arena, count):
    asked = []
    budget = gpumem.Budget(8 * MIB, on_pressure=lambda budget, nbytes: asked.append(nbytes))
    arena = make_arena({"backing": "regions"}, debug_heap=True, budget=budget, count=count)
    for _ in range(6):
        arena.allocate(3 * MIB).close()
    assert asked == []
    with pytest.raises(gpumem.errors.BudgetExceededError):
        arena.allocate(9 * MIB)


def test_published_counters_equal_stats(make_arena, streams, driver):
    arena = make_arena(debug_heap=True, name="counted by others")
    live = [arena.allocate(1000 * n) for n in range(1, 11)]
    for _ in range(4):
        live.pop().close()
    arena.check_heap()
    waits = arena.allocate(5000, streams[0])
    with driver.block(streams[0]):
        waits.close()
        lines = [line for line in observe.prometheus_text().splitlines() if arena.name in line]
    told = {line.partition("{")[0]: int(line.rpartition(" ")[2]) for line in lines}
    stats = arena.stats()
    for metric, counter in (
        ("in_use_bytes", "in_use"),
        ("requested_bytes", "requested_in_use"),
        ("allocations_total", "num_allocs"),
        ("frees_total", "num_frees"),
    ):
        assert told[f"gpumem_{metric}"] == getattr(stats, counter), counter
    for buffer in live:
        buffer.close()


def test_out_of_memory_error_counts_guards_in_its_remedies(make_arena):
    arena = make_arena({"max_mem": 4 * MIB}, debug_heap=True)
    with pytest.raises(gpumem.OutOfMemoryError, match="larger than max_mem") as caught:
        arena.allocate(4 * MIB)
    assert caught.value.allocated_nbytes == 4 * MIB + GUARDS


@pytest.mark.parametrize("nbytes", [(1 << 48) - 256, (1 << 48) - 512, 1 << 48, (1 << 64) - 1])
def test_size_that_overflows_with_guards_is_out_of_memory(make_arena, nbytes):
    arena = make_arena(debug_heap=True)
    for allocate in (arena.allocate, arena.allocate_persistent):
        with pytest.raises(gpumem.OutOfMemoryError):
            allocate(nbytes)
    assert arena.stats().in_use == 0


def test_aligned_shareable_blocks_stay_zero(make_arena):
    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(5000, shareable=True, alignment=4096)
    assert bytes(buffer) == bytes(5000)
    buffer.close()
    assert arena.check_heap() == ()

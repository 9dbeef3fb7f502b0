"""Arenas that charge a budget: what they hold or what is in use, of every kind of memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers.c_arena import CArena, Failed
from helpers.child import run_quietly
from helpers.driver import HostDriver
from helpers.threads import in_threads
from helpers.waiting import without_waiting

import gpumem
from gpumem import Budget
from gpumem._testing.arenas import block_handle, free_block, release_retired

MIB = 1 << 20
BACKINGS = ("virtual", "regions")
KINDS = {
    "pages": ("host", {"backing": "virtual"}),
    "regions": ("host", {"backing": "regions"}),
    "exact regions": ("host", {"extend_strategy": "same_as_requested"}),
    "ort": ("host", {"split_rule": "ort"}),
    "pinned": ("host/host_accessible", {}),
    "managed": ("host/managed", {}),
    "passed through": ("host", {"enable": False}),
}


@pytest.fixture
def budget():
    """A budget in a tree; whoever uses it gives everything back."""
    root = Budget(1 << 40, name="root")
    made = Budget(1 << 40, parent=root, name="tenant")
    yield made
    gc.collect()
    release_retired()
    assert (made.used, root.used) == (0, 0)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


# ---- what counts ---------------------------------------------------------------------------------


def test_reserved_memory_is_charged(kind, budget, make_arena, rng):
    memory, config = kind
    arena = make_arena(config, memory, budget=budget)
    assert arena.budget is budget
    live = []
    for _ in range(300):
        choice = rng.randrange(10)
        if choice < 5 or not live:
            live.append(arena.allocate(rng.choice((1, 3000, 70000, 3 * MIB))))
        elif choice < 8:
            live.pop(rng.randrange(len(live))).close()
        elif choice == 8:
            live.append(arena.allocate_persistent(rng.choice((1, 5000, MIB))))
        else:
            arena.shrink()
        assert budget.used == budget.parent.used == arena.stats().reserved
    for buffer in live:
        buffer.close()
    arena.shrink()
    assert budget.used == arena.stats().reserved


def test_memory_in_use_is_charged(kind, budget, make_arena, rng):
    memory, config = kind
    arena = make_arena(config, memory, budget=budget, count="in_use")
    streams = [None, gpumem.Stream("host"), gpumem.Stream("host")]
    live = []
    for _ in range(400):
        choice = rng.randrange(10)
        if choice < 5 or not live:
            size = rng.choice((1, 3000, 70000, 3 * MIB))
            live.append(arena.allocate(size, rng.choice(streams)))
        elif choice < 8:
            buffer = live.pop(rng.randrange(len(live)))
            if choice == 7:
                buffer.record_stream(streams[1])  # parked: no longer in use
            buffer.close()
        elif choice == 8:
            live.append(arena.allocate_persistent(rng.choice((1, 5000, MIB))))
        else:
            arena.shrink()
        assert (
            budget.used == arena.stats().in_use == sum(buffer.allocated_nbytes for buffer in live)
        )
    live.clear()
    assert budget.used == 0
    assert arena.stats().reserved > 0 or memory == "host/managed" or config.get("enable") is False


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_view_keeps_its_block_charged(count, budget, make_arena):
    arena = make_arena({"enable": False}, budget=budget, count=count)
    view = np.from_dlpack(arena.allocate(5000))
    assert budget.used >= 5000
    del view
    arena.shrink()
    assert budget.used == 0


@pytest.mark.parametrize("backing", BACKINGS)
def test_shareable_blocks_are_charged(backing, budget, make_arena):
    arena = make_arena({"backing": backing}, budget=budget)
    buffer = arena.allocate(100, shareable=True)
    assert budget.used == arena.stats().reserved >= 100
    buffer.close()
    arena.shrink()
    assert budget.used == 0
    counted = make_arena({"backing": backing}, budget=budget, count="in_use")
    buffer = counted.allocate(100, shareable=True)
    assert budget.used == counted.stats().in_use == buffer.allocated_nbytes
    buffer.close()
    assert budget.used == 0


def test_memory_of_a_source_is_charged(budget, make_arena):
    upstream = gpumem.Arena("host")
    arena = make_arena(source=upstream, budget=budget)
    buffer = arena.allocate(3 * MIB)
    assert budget.used == arena.stats().reserved > 0
    buffer.close()
    arena.shrink()
    assert budget.used == 0


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_graph_pool_charges_its_arenas_budget(count, budget):
    arena, stream = gpumem.Arena("host", budget=budget, count=count), gpumem.Stream("host")
    with arena.capture(stream) as pool:
        buffer = arena.allocate(4096, stream)
        wanted = pool.stats().reserved if count == "reserved" else 4096
        assert budget.used == wanted > 0
        assert [name for name, _ in budget.holders()] == [pool.name]
        buffer.close()
    pool.close()
    assert budget.used == 0


def test_prepared_memory_is_charged(budget, make_arena):
    arena = make_arena({"backing": "virtual"}, budget=budget)
    arena.prepare(10 * MIB)
    assert budget.used == arena.stats().reserved >= 10 * MIB


def test_suspend_releases_the_charge_and_resume_takes_it_again(make_arena):
    budget = Budget(20 * MIB, name="b")
    arena = make_arena({"backing": "virtual"}, budget=budget)
    buffers = [arena.allocate(3 * MIB), arena.allocate_persistent(MIB)]
    shared = arena.allocate(100, shareable=True)
    memoryview(buffers[0])[:3] = b"abc"
    before = budget.used
    arena.sleep()
    assert budget.used == arena.stats().reserved < 2 * MIB
    with budget.reserve(budget.free):
        with pytest.raises(gpumem.errors.BudgetExceededError, match="'b'"):
            arena.wake()
        assert arena.asleep
        assert budget.free == 0
    arena.wake()
    assert budget.used == before
    assert bytes(memoryview(buffers[0])[:3]) == b"abc"
    for buffer in (*buffers, shared):
        buffer.close()


def test_blocks_in_use_stay_charged_while_they_sleep(make_arena):
    budget = Budget(20 * MIB)
    arena = make_arena({"backing": "virtual"}, budget=budget, count="in_use")
    with arena.allocate(3 * MIB):
        arena.sleep()
        assert budget.used == arena.stats().in_use == 3 * MIB
        with budget.reserve(budget.free):
            arena.wake()
        assert budget.used == 3 * MIB


def test_resume_calls_the_pressure_callback(make_arena):
    budget = Budget(8 * MIB)
    arena = make_arena({"backing": "virtual"}, budget=budget)
    buffer = arena.allocate(3 * MIB)
    arena.sleep()
    held = [budget.reserve(8 * MIB)]
    budget.on_pressure = lambda budget, nbytes: held.pop().cancel()
    arena.wake()
    assert budget.used == arena.stats().reserved
    buffer.close()


# ---- refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["reserved", "in_use"])
@pytest.mark.parametrize("backing", BACKINGS)
def test_refused_block_changes_nothing(backing, count, make_arena):
    budget = Budget(8 * MIB, name="b")
    arena = make_arena({"backing": backing}, budget=budget, count=count, name="ours")
    buffer = arena.allocate(3 * MIB)
    before = arena.stats(), budget.used
    for size in (9 * MIB, 6 * MIB):
        with pytest.raises(gpumem.errors.BudgetExceededError, match="'b'") as raised:
            arena.allocate(size)
        error = raised.value
        assert (error.requested_nbytes, error.budget, error.limit) == (size, "b", 8 * MIB)
        assert error.in_use == before[0].in_use
        assert error.holders == (("ours", before[1]),)
        assert budget.used == before[1]
        after = arena.stats()
        assert (after.in_use, after.reserved) == (before[0].in_use, before[0].reserved)
    buffer.close()


@pytest.mark.parametrize("backing", BACKINGS)
def test_own_idle_memory_is_released_before_a_block_is_refused(backing, make_arena):
    budget = Budget(16 * MIB)
    arena = make_arena({"backing": backing}, budget=budget)
    first = arena.allocate(2 * MIB)
    for size in (5 * MIB, 9 * MIB, 3 * MIB, 13 * MIB):
        arena.allocate(size).close()
        assert budget.used <= 16 * MIB
    first.close()


def test_pages_move_before_the_budget_is_exceeded(make_arena):
    budget = Budget(64 * MIB)
    arena = make_arena({"backing": "virtual", "page_move_threshold": 1.0}, budget=budget)
    blocks = [arena.allocate(2 * MIB) for _ in range(32)]
    assert budget.free == 0
    del blocks[::2]
    large = arena.allocate(30 * MIB)  # no hole is so large
    assert arena.stats().pages_moved > 0
    assert budget.used <= 64 * MIB
    large.close()


def test_first_region_is_bounded_by_the_budget(make_arena):
    budget = Budget(300_000)
    arena = make_arena(budget=budget)
    buffer = arena.allocate(1000)
    assert arena.backing == "regions"
    assert 0 < budget.used == arena.stats().reserved <= 300_000
    buffer.close()


@pytest.mark.parametrize("odd", [1, 255])
def test_region_within_an_odd_budget_is_of_whole_quanta(make_arena, odd):
    arena = make_arena({"backing": "regions"}, budget=Budget(256 * 1000 + odd))
    buffer = arena.allocate(1000)
    assert arena.stats().reserved == 256 * 1000
    buffer.close()


def test_completed_blocks_of_other_streams_are_used_before_the_budget(make_arena, virtual_clock):
    budget = Budget(4 * MIB)
    arena = make_arena({"backing": "regions", "oom_wait_ms": 0}, budget=budget)
    one, two = gpumem.Stream("host"), gpumem.Stream("host")
    arena.allocate(3 * MIB, one).close()
    one.synchronize()
    arena.allocate(3 * MIB, two).close()
    assert budget.used <= 4 * MIB


def test_several_arenas_share_a_budget(make_arena):
    budget = Budget(16 * MIB)
    arenas = [make_arena({"backing": backing}, budget=budget, name=backing) for backing in BACKINGS]
    mine = arenas[0].allocate(9 * MIB)
    with pytest.raises(gpumem.errors.BudgetExceededError) as raised:
        arenas[1].allocate(9 * MIB)
    assert raised.value.holders == (("virtual", arenas[0].stats().reserved),)
    mine.close()
    arenas[0].shrink()
    arenas[1].allocate(9 * MIB).close()


# ---- callbacks -----------------------------------------------------------------------------------


def test_callback_shrinks_another_arena(make_arena):
    budget = Budget(16 * MIB)
    idle, busy = (make_arena({"backing": backing}, budget=budget) for backing in BACKINGS)
    idle.allocate(9 * MIB).close()
    asked = []

    def shrink(budget, nbytes):
        asked.append(nbytes)
        idle.shrink()

    budget.on_pressure = shrink
    with busy.allocate(9 * MIB):
        assert len(asked) == 1
        assert idle.stats().reserved == 0


@pytest.mark.parametrize(
    ("size", "asked"), [(6 * MIB, 2 * MIB), (6 * MIB + 1, 4 * MIB), (5 * MIB, 2 * MIB)]
)
def test_callback_of_a_paged_arena_is_asked_for_whole_pages(size, asked, make_arena):
    told = []
    budget = Budget(8 * MIB, on_pressure=lambda budget, nbytes: told.append(nbytes))
    arena = make_arena({"backing": "virtual"}, budget=budget)
    with arena.allocate(4 * MIB), pytest.raises(gpumem.errors.BudgetExceededError):
        arena.allocate(size)
    assert told == [asked]


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_callback_may_free_blocks_of_the_requesting_arena(count, make_arena):
    budget = Budget(10 * MIB)
    config = {"backing": "regions", "split_rule": "tight"}
    arena = make_arena(config, budget=budget, count=count)
    cache = [arena.allocate(4 * MIB), arena.allocate(4 * MIB)]
    budget.on_pressure = lambda budget, nbytes: cache.pop() if cache else None
    with arena.allocate(9 * MIB):
        assert not cache
        assert budget.used <= 10 * MIB


def test_callback_may_not_allocate_from_the_requesting_arena(make_arena):
    budget = Budget(4 * MIB)
    arena = make_arena({"backing": "regions"}, budget=budget)
    seen = []

    def again(budget, nbytes):
        with pytest.raises(gpumem.errors.BudgetExceededError):
            arena.allocate(8 * MIB)
        seen.append(arena.allocate(100).nbytes)

    budget.on_pressure = again
    with pytest.raises(gpumem.errors.BudgetExceededError):
        arena.allocate(9 * MIB)
    assert seen == [100]


def test_callback_may_close_the_requesting_arena():
    budget = Budget(4 * MIB)
    arena = gpumem.Arena("host", {"backing": "regions"}, budget=budget)
    budget.on_pressure = lambda budget, nbytes: arena.close()
    with pytest.raises(gpumem.errors.ClosedError):
        arena.allocate(9 * MIB)
    assert budget.used == 0


def test_callbacks_exception_is_the_errors_cause(make_arena):
    def fail(budget, nbytes):
        raise RuntimeError("nothing to give")

    budget = Budget(4 * MIB, on_pressure=fail)
    arena = make_arena(budget=budget)
    for call in (arena.allocate, arena.allocate_persistent, arena.prepare):
        with pytest.raises(gpumem.errors.BudgetExceededError) as raised:
            call(9 * MIB)
        assert str(raised.value.__cause__) == "nothing to give"
    assert budget.used == 0


@pytest.mark.parametrize("backing", BACKINGS)
def test_arena_that_a_callback_drops_is_not_counted_any_more(backing):
    budget = Budget(8 * MIB)
    held = [gpumem.Arena("host", {"backing": backing}, budget=budget).allocate(3 * MIB)]
    budget.on_pressure = lambda budget, nbytes: held.clear()
    with budget.reserve(8 * MIB):
        assert budget.used == 8 * MIB
    assert budget.used == 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("backing", BACKINGS)
def test_arena_that_the_soft_limits_callback_drops_is_not_counted_any_more(
    backing, fails, monkeypatch
):
    budget = Budget(None, soft=6 * MIB)
    held = [gpumem.Arena("host", {"backing": backing}, budget=budget).allocate(3 * MIB)]

    def drop(budget, nbytes):
        dropped = held.pop()
        assert not fails, dropped

    monkeypatch.setattr("sys.unraisablehook", lambda problem: None)
    budget.on_pressure = drop
    with budget.reserve(7 * MIB):
        assert not held
        assert budget.used == 7 * MIB


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_soft_limit_notifies_and_serves(count, make_arena):
    told = []
    budget = Budget(None, soft=4 * MIB, on_pressure=lambda budget, nbytes: told.append(nbytes))
    arena = make_arena({"extend_strategy": "same_as_requested"}, budget=budget, count=count)
    buffers = [arena.allocate(3 * MIB)]
    assert told == []
    buffers.append(arena.allocate(2 * MIB))
    assert told == [MIB]
    buffers.append(arena.allocate(MIB))
    assert told == [MIB]


# ---- joining and leaving -------------------------------------------------------------------------


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("end", ["close", "drop", "drop with a view"])
def test_charge_is_released_once_with_the_arena(backing, end):
    root = Budget(1 << 40)
    budget = Budget(1 << 40, parent=root)
    arena = gpumem.Arena("host", {"backing": backing}, budget=budget)
    buffer = arena.allocate(5 * MIB)
    assert budget.used > 0
    view = np.from_dlpack(buffer) if end == "drop with a view" else None
    del buffer
    if end == "close":
        arena.close()
        assert (budget.used, root.used) == (0, 0)
    del arena
    release_retired()
    if view is not None:
        assert budget.used > 0
    del view
    release_retired()
    assert (budget.used, root.used, budget.holders()) == (0, 0, ())


def test_budget_lives_as_long_as_arenas_charge_it():
    root = Budget(1 << 40)
    arena = gpumem.Arena("host", budget=Budget(1 << 40, parent=root, name="short"))
    view = np.from_dlpack(arena.allocate(5 * MIB))
    del arena
    gc.collect()
    assert root.used > 0
    del view
    release_retired()
    assert root.used == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"budget": 5}, TypeError),
        ({"count": "in_use"}, gpumem.ConfigError),
        ({"budget": Budget(1), "count": "both"}, gpumem.ConfigError),
        ({"budget": Budget(1), "count": None}, gpumem.ConfigError),
    ],
)
def test_invalid_budget_arguments_make_no_arena(arguments, error):
    with pytest.raises(error, match=r"budget|count"):
        gpumem.Arena("host", **arguments)


def test_forked_child_leaves_the_parents_charge_alone():
    run_quietly("""
        import os, gpumem
        for count in ("reserved", "in_use"):
            budget = gpumem.Budget(1 << 30)
            arena = gpumem.Arena("host", {"backing": "regions"}, budget=budget, count=count)
            buffer = arena.allocate(1 << 20)
            used = budget.used
            pid = os.fork()
            if pid == 0:
                buffer.close(), arena.close()
                del buffer, arena
                assert budget.used == 0
                mine = gpumem.Arena("host", {"backing": "regions"}, budget=budget, count=count)
                with mine.allocate(1 << 20):
                    assert budget.used == used
                mine.close()
                assert budget.used == 0
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert budget.used == used
            buffer.close(), arena.close()
            assert budget.used == 0
    """)


@pytest.mark.parametrize("backing", BACKINGS)
def test_block_pending_free_is_reserved_and_not_in_use(backing, make_arena, stream):
    held, used = Budget(None), Budget(None)
    for budget, count in ((held, "reserved"), (used, "in_use")):
        arena = make_arena({"backing": backing}, budget=budget, count=count)
        buffer = arena.allocate(MIB)
        gate = HostDriver().block(stream)
        buffer.record_stream(stream)
        buffer.close()
        assert (budget.used > 0) == (count == "reserved")
        gate.open()
        stream.synchronize()


# ---- a limit of the arena beside it, and requests as large as a limit ----------------------------


EXACT = {
    "pages": {"backing": "virtual", "oom_wait_ms": 0},
    "regions": {"extend_strategy": "same_as_requested", "oom_wait_ms": 0},
}


@pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT)
def test_limit_of_the_arena_refuses_where_its_budget_has_room(settings, make_arena):
    budget = Budget(1 << 30)
    arena = make_arena({**settings, "max_mem": 8 * MIB}, budget=budget)
    held = arena.allocate(6 * MIB)
    with pytest.raises(gpumem.OutOfMemoryError) as refused:
        arena.allocate(4 * MIB)
    assert type(refused.value) is gpumem.OutOfMemoryError
    assert budget.used == arena.stats().reserved <= 8 * MIB
    with arena.allocate(2 * MIB):
        assert budget.used == 8 * MIB
    held.close()


@pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize(("max_mem", "limit"), [(8 * MIB, None), (0, 8 * MIB)])
def test_idle_memory_makes_room_for_a_block_as_large_as_the_limit(
    settings, max_mem, limit, make_arena
):
    budget = Budget(limit)
    arena = make_arena({**settings, "max_mem": max_mem}, budget=budget)
    for _ in range(2):
        blocks = [arena.allocate(2 * MIB) for _ in range(4)]
        blocks.clear()
        with arena.allocate(8 * MIB):
            assert budget.used == 8 * MIB
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(8 * MIB + 256)
        assert budget.used == 8 * MIB  # what is refused anyway gives nothing back


# ---- memory that another arena holds and does not use --------------------------------------------


@pytest.fixture(params=BACKINGS)
def tenants(request, make_arena):
    """Two arenas under one limit of 64 MiB."""
    process = Budget("64MiB", name="process")
    config = {"backing": request.param, "oom_wait_ms": 0}
    config |= {"extend_strategy": "same_as_requested"} if request.param == "regions" else {}
    return [
        make_arena(config, budget=Budget("64MiB", parent=process, name=name)) for name in ("a", "b")
    ]


def test_refused_arena_gets_what_another_one_does_not_use(tenants):
    first, second = tenants
    kept = first.allocate("20MiB")
    memoryview(kept)[:] = bytes([7]) * kept.nbytes
    first.allocate("40MiB").close()
    with second.allocate("40MiB"):
        assert first.stats().reserved == 20 * MIB
        assert bytes(kept) == bytes([7]) * kept.nbytes
        with pytest.raises(gpumem.errors.BudgetExceededError):
            first.allocate("40MiB")
    first.allocate("40MiB").close()
    kept.close()


def test_reservation_gets_what_an_arena_does_not_use(tenants):
    first, _ = tenants
    first.allocate("40MiB").close()
    process = first.budget.parent
    with process.reserve("60MiB"):
        assert process.used == 60 * MIB


def test_refused_arena_does_not_wait_for_work_in_what_another_one_freed(tenants, driver, stream):
    first, second = tenants
    with driver.block(stream) as gate:
        block = first.allocate("40MiB", stream)
        driver.fill(block, 1, stream)
        block.close()
        with without_waiting(gate), pytest.raises(gpumem.errors.BudgetExceededError):
            second.allocate("40MiB")
        assert first.stats().reserved == 40 * MIB
    stream.synchronize()
    second.allocate("40MiB").close()


def test_pressure_callback_comes_before_what_another_arena_does_not_use(tenants):
    first, second = tenants
    first.allocate("20MiB").close()
    cache = [second.allocate("20MiB")]
    process = first.budget.parent
    asked = []

    def drop(_, nbytes):
        asked.append(nbytes)
        cache.clear()

    process.on_pressure = drop
    second.allocate("40MiB").close()
    assert asked == [16 * MIB]
    assert first.stats().reserved == 20 * MIB


def test_arenas_that_refuse_each_other_at_once_go_on(tenants):
    served = [0, 0]

    def work(number):
        for _ in range(200):
            try:
                tenants[number].allocate("40MiB").close()
            except gpumem.errors.BudgetExceededError:
                continue
            served[number] += 1

    in_threads(work, (0, 1))
    assert all(served)
    tenants[0].allocate("60MiB").close()


def test_request_that_fails_anyway_leaves_other_arenas_as_they_are(tenants):
    first, second = tenants
    first.allocate("20MiB").close()
    with second.allocate("30MiB"), pytest.raises(gpumem.errors.BudgetExceededError):
        second.allocate("40MiB")
    assert first.stats().reserved == 20 * MIB


def test_error_names_the_tags_that_hold_the_memory(tenants):
    arena, _ = tenants
    with gpumem.observe.record(arena), gpumem.observe.tag("cache"):
        cache = arena.allocate("40MiB")
        with pytest.raises(gpumem.errors.BudgetExceededError, match=r"in use by cache 40\.0 MiB"):
            arena.allocate("40MiB")
    cache.close()


def test_free_of_a_stale_handle_uncharges_nothing(make_arena):
    budget = Budget(8 * MIB)
    arena = make_arena(budget=budget, count="in_use")
    kept, freed = arena.allocate(1000), arena.allocate(5000)
    handle = block_handle(freed)
    freed.close()
    assert budget.used == kept.allocated_nbytes
    assert not free_block(arena, handle)
    assert budget.used == kept.allocated_nbytes
    kept.close()
    assert budget.used == 0


def test_c_callers_pressure_within_a_tag_is_told_what_is_missing(make_arena):
    missing = []
    budget = Budget(8 * MIB, on_pressure=lambda _, nbytes: missing.append(nbytes))
    arena = make_arena({"backing": "virtual", "oom_wait_ms": 0}, budget=budget)
    c = CArena(arena)
    with arena.tag("cache"):
        held = c.allocate(5 * MIB)
        used = budget.used
        with pytest.raises(Failed):
            c.allocate(5 * MIB)
        c.deallocate(held)
    assert missing[0] == used + 6 * MIB - budget.limit
    assert len(missing) == 1


@pytest.mark.parametrize("read", ["used", "free", "holders"])
def test_reader_of_a_budget_does_not_see_a_dropped_arena(read):
    budget = Budget(64 * MIB)
    block = gpumem.Arena("host", budget=budget).allocate(MIB)
    assert budget.used > 0
    del block
    found = getattr(budget, read)
    assert (found() if callable(found) else found) == {"used": 0, "free": 64 * MIB, "holders": ()}[
        read
    ]

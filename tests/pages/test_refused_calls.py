"""Paged arenas whose driver refuses a call: what is undone, kept, or tried again later."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import pytest

import gpumem
from gpumem import observe
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
VIRTUAL = {"backing": "virtual", "page_move_threshold": 0, "page_move_budget": 1}


def alive(host):
    release_retired()
    return {name: host.live()[name] for name in ("handles", "mappings", "reservations")}


@pytest.fixture
def nothing_left(host):
    """Whatever the test does, the driver has all memory and addresses back at its end."""
    gc.collect()
    before = alive(host)
    yield
    gc.collect()
    assert alive(host) == before


def crowded():
    """Make an arena whose idle pages lie on both sides of a live one: 8 MiB in two halves."""
    arena = gpumem.Arena("host", VIRTUAL)
    first, pin, second = (arena.allocate(size * MIB) for size in (4, 2, 4))
    first.close()
    second.close()
    return arena, pin


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("call", "number"),
    [("cuCtxPushCurrent", 1), *(("cuMemMap", i) for i in range(1, 4)), ("cuMemSetAccess", 1)],
)
def test_refused_move_names_the_call_and_leaves_blocks_and_memory(host, call, number):
    arena, pin = crowded()
    memoryview(pin)[:3] = b"abc"
    before = arena.stats()
    host.fail(call, number, INVALID_VALUE, 0)
    with pytest.raises(gpumem.errors.DriverError, match=call):
        arena.allocate(9 * MIB)
    host.clear_faults()
    after = arena.stats()
    assert (after.in_use, after.num_allocs) == (before.in_use, before.num_allocs)
    assert after.reserved <= before.reserved
    arena.check_invariants()
    assert bytes(memoryview(pin)[:3]) == b"abc"
    with arena.allocate(9 * MIB) as block:
        memoryview(block)[:] = bytes(block.nbytes)
        assert arena.stats().reserved == 12 * MIB
    assert bytes(memoryview(pin)[:3]) == b"abc"
    pin.close()
    arena.close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_memory_of_a_refused_plan_serves_other_streams_once_its_stream_has_passed(
    make_arena, host, call
):
    one, two = gpumem.Stream("host"), gpumem.Stream("host")
    arena = make_arena(VIRTUAL)
    arena.allocate(8 * MIB, one).close()
    host.fail(call, 1, INVALID_VALUE, 0)
    with pytest.raises(gpumem.errors.DriverError, match=call):
        arena.allocate(12 * MIB, one)
    host.clear_faults()
    one.synchronize()
    with arena.allocate(8 * MIB, two):
        assert arena.stats().reserved == 8 * MIB


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", range(1, 5))  # neighbouring pages go with one unmap
def test_refused_unmap_in_a_suspend_loses_no_byte(host, number):
    arena, pin = crowded()
    moved = arena.allocate(8 * MIB)  # the views of before its moves stay
    for block, value in ((pin, 1), (moved, 2)):
        memoryview(block)[:] = bytes([value]) * block.nbytes
    reserved = arena.stats().reserved
    host.fail("cuMemUnmap", number, INVALID_VALUE, 0)
    with contextlib.suppress(gpumem.errors.DriverError):
        arena.sleep()
    failed = host.last_fault()
    host.clear_faults()
    assert failed == ("cuMemUnmap" if number <= 3 else None)
    if arena.asleep:
        arena.wake()
    arena.check_invariants()
    assert arena.stats().reserved == reserved
    for block, value in ((pin, 1), (moved, 2)):
        assert set(bytes(memoryview(block))) == {value}
        block.close()
    arena.close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", range(1, 6))
def test_out_of_memory_in_a_plan_makes_no_page(host, number):
    arena = gpumem.Arena("host", VIRTUAL)
    held = arena.allocate(2 * MIB)
    host.fail("cuMemCreate", number, OUT_OF_MEMORY, 0)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(10 * MIB)
    host.clear_faults()
    assert arena.stats().reserved == 2 * MIB
    with arena.allocate(10 * MIB):
        assert arena.stats().reserved == 12 * MIB
    held.close()
    arena.close()


@pytest.mark.usefixtures("nothing_left")
def test_memory_that_the_driver_does_not_take_back_is_released_with_the_next_shrink(host):
    arena = gpumem.Arena("host", VIRTUAL)
    pages = 300
    before = alive(host)
    for block in [arena.allocate(2 * MIB) for _ in range(pages)]:
        block.close()
    host.fail("cuMemRelease", 1, INVALID_VALUE, 0)
    assert arena.shrink().released_bytes == pages * 2 * MIB
    assert alive(host)["handles"] - before["handles"] == pages
    host.clear_faults()
    host.fail("cuMemRelease", 100, INVALID_VALUE, 50)  # among those that are tried again
    arena.allocate(2 * MIB).close()
    arena.shrink()
    host.clear_faults()
    assert 0 < alive(host)["handles"] - before["handles"] <= 50
    arena.allocate(2 * MIB).close()
    arena.shrink()
    assert alive(host)["handles"] == before["handles"]
    arena.close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuMemUnmap"])
def test_refused_shrink_keeps_memory_for_the_next_one(host, call):
    arena = gpumem.Arena("host", VIRTUAL)
    for block in [arena.allocate(2 * MIB) for _ in range(4)]:
        block.close()
    arena.shrink()
    for block in [arena.allocate(2 * MIB) for _ in range(4)]:
        block.close()
    before = arena.stats()
    host.fail(call, 1, INVALID_VALUE, 0)
    assert arena.shrink().released_bytes == 0
    host.clear_faults()
    assert arena.stats().num_shrinkages == before.num_shrinkages
    arena.check_invariants()
    assert arena.shrink().released_bytes == 8 * MIB
    assert arena.stats().num_shrinkages > before.num_shrinkages
    arena.close()


@pytest.mark.usefixtures("nothing_left")
def test_persistent_block_is_released_later_after_a_failed_release(host):
    arena = gpumem.Arena("host", {"backing": "regions"})
    arena.allocate_persistent(3 * MIB).close()
    host.fail("cuMemFreeAsync", 1, INVALID_VALUE, 0)
    assert arena.shrink().released_bytes == 0
    assert arena.stats().reserved == 3 * MIB
    host.clear_faults()
    assert arena.shrink().released_bytes == 3 * MIB
    assert arena.stats().reserved == 0
    arena.check_invariants()
    arena.close()


@pytest.mark.usefixtures("nothing_left")
def test_dropped_arena_unmaps_the_views_that_its_moves_left(host):
    arena, pin = crowded()
    mapped = host.live()["mappings"]
    with arena.allocate(8 * MIB):
        assert arena.stats().pages_moved == 2
        assert host.live()["mappings"] == mapped + 2, "the views of before stay"
    pin.close()


@pytest.mark.usefixtures("nothing_left")
def test_idle_pages_inside_hundreds_of_free_chunks_move_and_go_back():
    # Each has a live block on either side: a page that leaves cuts its chunk in pieces.
    arena = gpumem.Arena("host", VIRTUAL | {"max_mem": 3000 * MIB})
    chunks = 300
    blocks = [arena.allocate(size * MIB) for _ in range(chunks) for size in (5, 1)]
    for block in blocks[::2]:
        block.close()
    before = arena.stats().reserved
    with arena.allocate(chunks * 2 * MIB):
        assert arena.stats().pages_moved >= chunks // 2
        assert arena.stats().reserved <= before + 2 * MIB
    arena.check_invariants()
    assert arena.shrink().released_bytes >= chunks * 2 * MIB
    arena.check_invariants()
    for block in blocks[1::2]:
        block.close()
    arena.close()


@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_region_that_the_driver_does_not_take_back_is_recorded_as_held(make_arena, host, backing):
    arena = make_arena({"backing": backing})
    kinds = "cuMemUnmap" if backing == "virtual" else "cuMemFreeAsync"
    arena.allocate(MIB).close()
    with observe.record(arena) as recording:
        host.fail(kinds, 1, INVALID_VALUE, 0)
        assert arena.shrink().released_bytes == 0
        host.clear_faults()
        refused = [event.action for event in recording.events()]
        held = arena.stats().reserved
        assert arena.shrink().released_bytes == held
    memory = [event for event in recording.events() if event.action in ("reserve", "release")]
    change = {"reserve": 1, "release": -1}
    assert sum(change[event.action] * event.nbytes for event in memory) == -held
    assert refused.count("reserve") == refused.count("release")


def test_no_call_changes_the_threads_current_context(host, driver):
    current, mine = ctypes.c_uint64(), driver._context
    stream = gpumem.Stream("host")

    def check():
        assert driver._function("cuCtxGetCurrent")(ctypes.byref(current)) == 0
        assert current.value == mine

    # Twice, so that one pop too many would show as well as one push.
    assert driver._function("cuCtxPushCurrent")(mine) == 0
    try:
        for backing in ("virtual", "regions"):
            arena = gpumem.Arena("host", {"backing": backing, "oom_wait_ms": 0})
            held = [arena.allocate(size * MIB, stream) for size in (4, 2, 4)]
            check()
            arena.prepare(8 * MIB)
            held.append(arena.allocate(8 * MIB))
            held.append(arena.allocate_persistent(MIB))
            held.append(arena.allocate(100, shareable=True))
            check()
            held[0].close()
            held[2].close()
            stream.synchronize()
            held.append(arena.allocate(300 * MIB))  # asks what the device has free
            check()
            arena.shrink()
            check()
            if backing == "virtual":
                arena.sleep()
                check()
                arena.wake()
                check()
            for block in held:
                block.close()
            arena.reset_stream(stream)
            check()
            arena.shrink()
            check()
            arena.close()
            check()
            del arena
            release_retired()
            check()
    finally:
        assert driver._function("cuCtxPopCurrent")(ctypes.byref(current)) == 0

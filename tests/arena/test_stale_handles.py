"""A handle names its block while the block is handed out, and nothing after that."""

import pytest
from helpers.threads import in_a_thread

import gpumem
from gpumem._testing.arenas import block_handle, free_block

KIB, MIB = 1 << 10, 1 << 20
BEYOND = 1 << 26  # chunks; more than a table takes


@pytest.fixture(params=["regions", "virtual"])
def arena(make_arena, request):
    arena = make_arena({"backing": request.param, "split_rule": "tight"})
    pin = arena.allocate(256)  # grown: small blocks of pages have a table of their own now
    yield arena
    pin.close()


def is_stale(arena, handle):
    """Whether a free by the handle is refused and changes nothing."""
    before = arena.stats()
    freed = free_block(arena, handle)
    arena.check_invariants()
    return not freed and arena.stats() == before


@pytest.mark.parametrize("nbytes", [KIB, 64 * KIB, 100 * KIB, 3 * MIB])
def test_handle_is_stale_once_its_block_is_freed(arena, nbytes):
    buffer, beside = arena.allocate(nbytes), arena.allocate(nbytes)
    handle = block_handle(buffer)
    buffer.close()
    assert not free_block(arena, handle), "in the thread's cache"
    arena.stats()  # flushes the caches
    assert is_stale(arena, handle), "free"
    beside.close()
    arena.stats()
    assert is_stale(arena, handle), "merged"


@pytest.mark.parametrize("nbytes", [KIB, 100 * KIB])
@pytest.mark.parametrize("flushed", [False, True])
def test_handle_does_not_name_the_next_block_of_its_place(arena, nbytes, flushed):
    buffer = arena.allocate(nbytes)
    address, handle = buffer.ptr, block_handle(buffer)
    for _ in range(5):
        buffer.close()
        if flushed:
            arena.stats()
        buffer = arena.allocate(nbytes)
        assert buffer.ptr == address
        assert is_stale(arena, handle)
        assert block_handle(buffer) != handle
    handle = block_handle(buffer)
    buffer.close()


def test_handle_of_a_block_freed_by_another_thread_is_stale_at_once(arena):
    buffer = arena.allocate(KIB)
    handle = block_handle(buffer)
    in_a_thread(buffer.close)
    assert not free_block(arena, handle)


def test_handle_of_a_merged_chunk_does_not_name_a_block_cut_later(arena):
    first, second = arena.allocate(100 * KIB), arena.allocate(100 * KIB)
    pin, handle = arena.allocate(256), block_handle(second)
    first.close()
    second.close()
    arena.stats()
    held = [arena.allocate(nbytes) for nbytes in (50 * KIB, 70 * KIB, 30 * KIB)]
    assert is_stale(arena, handle)
    held.clear()
    pin.close()


def test_handle_is_stale_while_recorded_streams_use_the_freed_block(arena):
    buffer = arena.allocate(MIB)
    handle = block_handle(buffer)
    buffer.record_stream(gpumem.Stream("host"))
    buffer.close()
    assert is_stale(arena, handle)


def test_handle_of_a_persistent_block_is_stale_once_it_is_freed(arena):
    buffer = arena.allocate_persistent(MIB)
    handle = block_handle(buffer)
    buffer.close()
    assert is_stale(arena, handle)
    arena.shrink()
    assert is_stale(arena, handle)


def test_handle_of_a_chunk_that_never_was_is_stale(arena):
    buffer = arena.allocate(KIB)
    handle = block_handle(buffer)
    for index in (1000, BEYOND):
        assert is_stale(arena, handle + index)
    assert is_stale(arena, handle + (1 << 32)), "a generation to come"
    buffer.close()


def test_stale_handle_changes_no_budget(make_arena):
    budget = gpumem.Budget(8 * MIB)
    arena = make_arena(budget=budget, count="in_use")
    buffer, other = arena.allocate(KIB), arena.allocate(MIB)
    handle = block_handle(buffer)
    buffer.close()
    assert budget.used == MIB
    assert not free_block(arena, handle)
    assert budget.used == MIB
    other.close()


def test_passed_through_block_is_released_to_the_driver_once_at_its_free(make_arena, host):
    arena = make_arena({"enable": False})
    for charged in (False, True):
        if charged:
            arena = make_arena({"enable": False}, budget=gpumem.Budget(MIB), count="in_use")
        buffer = arena.allocate(MIB)
        handle, frees = block_handle(buffer), host.call_count("cuMemFreeAsync")
        buffer.close()
        assert host.call_count("cuMemFreeAsync") == frees + 1
        calls = host.call_count()
        assert not free_block(arena, handle)
        assert host.call_count() == calls

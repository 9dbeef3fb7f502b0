"""Limits, exhaustion and recovery: what fails, fails with its numbers and leaves all as it was."""

import copy
import pickle

import pytest

import gpumem

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("max_mem", "blocks"), [(MIB, MIB // 256), (1000, 3)])
def test_max_mem_can_be_allocated_to_the_last_whole_256_bytes(make_arena, max_mem, blocks):
    arena = make_arena({"max_mem": max_mem, "split_rule": "tight"})
    buffers = [arena.allocate(256) for _ in range(blocks)]
    assert arena.stats().in_use == blocks * 256
    assert arena.stats().reserved <= max_mem
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(1)
    del buffers


def everything(arena):
    return arena.stats(), arena.blocks()


def test_failed_request_leaves_stats_and_blocks_unchanged(make_arena):
    arena = make_arena({"max_mem": 4 * MIB})
    held = [arena.allocate(size) for size in (100, 300 * KIB, 2 * MIB)]
    held[1].close()
    before = everything(arena)
    for _ in range(3):
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(3 * MIB)
        arena.check_invariants()
        assert everything(arena) == before
    del held


def test_request_above_max_mem_releases_no_idle_region(make_arena):
    arena = make_arena({"max_mem": 4 * MIB})
    arena.allocate(MIB).close()
    before = everything(arena)
    for allocate in (arena.allocate, arena.allocate_persistent):
        with pytest.raises(gpumem.OutOfMemoryError, match="alone is larger than max_mem"):
            allocate(5 * MIB)
    assert everything(arena) == before


def test_idle_regions_are_released_before_a_request_fails(make_arena):
    arena = make_arena({"max_mem": 4 * MIB, "extend_strategy": "same_as_requested"})
    first, second = arena.allocate(2 * MIB), arena.allocate(2 * MIB)
    del first, second
    assert arena.allocate(4 * MIB).nbytes == 4 * MIB
    assert (arena.stats().num_shrinkages, arena.stats().num_regions) == (2, 1)


ALONE = {
    "persistent": lambda arena, nbytes: arena.allocate_persistent(nbytes),
    "shareable": lambda arena, nbytes: arena.allocate(nbytes, shareable=True),
    "for a transport": lambda arena, nbytes: arena.allocate(nbytes, transport="ipc"),
}


@pytest.mark.parametrize("limit", ["max_mem", "budget"])
@pytest.mark.parametrize("sizes", [[40 * MIB], [100_000] * 400])
@pytest.mark.parametrize(
    ("backing", "kind"),
    [("regions", kind) for kind in ALONE] + [("virtual", kind) for kind in [*ALONE, "prepared"]],
)
def test_arena_releases_idle_memory_for_a_request_that_does_not_fit_into_it(
    make_arena, kind, sizes, backing, limit
):
    """In threads' caches, and freed on a stream whose last event nobody has asked for."""
    config = {"backing": backing, "oom_wait_ms": 0}
    budget = None
    if limit == "budget":
        budget = gpumem.Budget(64 * MIB)
    else:
        config["max_mem"] = 64 * MIB
    arena = make_arena(config, budget=budget)
    blocks = [arena.allocate(size) for size in sizes]
    blocks.clear()
    if kind == "prepared":
        arena.prepare(48 * MIB)
        calls = arena.stats().driver_calls
        block = arena.allocate(48 * MIB)
        assert arena.stats().driver_calls == calls
    else:
        block = ALONE[kind](arena, 48 * MIB)
    assert arena.stats().reserved <= 64 * MIB
    memoryview(block)[-1] = 7
    block.close()


def test_memory_freed_by_others_is_found_after_a_failure(make_arena, leave_room):
    arena, other = make_arena(), make_arena()
    leave_room(4 * MIB)
    held = other.allocate(4 * MIB)
    with pytest.raises(gpumem.OutOfMemoryError, match="others hold on the device"):
        arena.allocate(2 * MIB)
    held.close()
    other.shrink()
    assert arena.allocate(2 * MIB).nbytes == 2 * MIB


def test_allocation_succeeds_again_after_a_free(make_arena, rng):
    arena = make_arena({"max_mem": MIB, "split_rule": "tight"})
    held = []
    for _ in range(20):
        with pytest.raises(gpumem.OutOfMemoryError):  # noqa: PT012
            while True:
                held.append(arena.allocate(rng.randrange(1, 100 * KIB)))
        arena.check_invariants()
        room = held.pop(rng.randrange(len(held))).allocated_nbytes
        held.append(arena.allocate(room))


@pytest.mark.parametrize("persistent", [False, True])
def test_out_of_memory_error_has_all_its_fields(make_arena, persistent):
    arena = make_arena({"max_mem": 2 * MIB, "split_rule": "tight"})
    held = arena.allocate(700 * KIB)
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        (arena.allocate_persistent if persistent else arena.allocate)(2 * MIB - 1)
    error = caught.value
    assert (error.requested_nbytes, error.allocated_nbytes) == (2 * MIB - 1, 2 * MIB)
    assert (error.in_use, error.reserved, error.limit) == (700 * KIB, MIB, 2 * MIB)
    assert error.largest_free == MIB - 700 * KIB
    assert (error.device, error.stream) == ("host:0", 1)
    assert error.advice == "free buffers, or raise max_mem"
    assert str(error).splitlines()[0] == (
        "host:0 is out of memory: asked for 2.0 MiB (2097151 bytes); 700.0 KiB in use, 1.0 MiB "
        f"reserved, limit 2.0 MiB, largest free block 324.0 KiB; {error.advice}"
    )
    assert isinstance(error, MemoryError)
    assert isinstance(error, gpumem.GpumemError)
    held.close()


def test_out_of_memory_error_names_the_stream(make_arena):
    arena, stream = make_arena({"max_mem": MIB}), gpumem.Stream("host")
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        arena.allocate(2 * MIB, stream)
    assert caught.value.stream == stream.ptr


def test_out_of_memory_error_reports_the_requested_size_and_alignment(make_arena):
    arena = make_arena({"max_mem": MIB})
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        arena.allocate(MIB - 1000, alignment=4096)
    assert caught.value.requested_nbytes == MIB - 1000
    assert caught.value.allocated_nbytes > MIB
    assert " with padding; " in str(caught.value)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_out_of_memory_error_survives_copy_and_pickle(make_arena, copied):
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        make_arena({"max_mem": MIB}).allocate(2 * MIB)
    again = copied(caught.value)
    assert type(again) is gpumem.OutOfMemoryError
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


def test_host_device_capacity_limits_arenas(make_arena, leave_room):
    leave_room(2 * MIB)
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        make_arena().allocate(3 * MIB)
    assert (caught.value.limit, caught.value.reserved) == (0, 0)


def test_close_returns_all_memory_to_the_device(make_arena):
    device = gpumem.Device("host")
    before = device.free_bytes
    with gpumem.Arena("host") as arena:
        arena.allocate(64 * MIB).close()
        weights = arena.allocate_persistent(64 * MIB)
        assert before - device.free_bytes == 128 * MIB
        weights.close()
    assert device.free_bytes == before


def test_dropped_arena_returns_its_memory():
    device = gpumem.Device("host")
    before = device.free_bytes
    arena = gpumem.Arena("host")
    buffer = arena.allocate(64 * MIB)
    del arena
    assert device.free_bytes == before - 64 * MIB
    del buffer
    assert device.free_bytes == before

"""The regions an arena asks its driver for: their sizes, in their order."""

import pytest

import gpumem

KIB, MIB = 1 << 10, 1 << 20
ARENA_CONFIG = {"backing": "regions", "split_rule": "tight"}


def grow(arena, *requests):
    """Allocate each size; returns the size of the region that each of them added."""
    sizes, held = [], []
    for nbytes in requests:
        before = arena.stats().reserved
        held.append(arena.allocate(nbytes))
        sizes.append(arena.stats().reserved - before)
    for buffer in held:
        buffer.close()
    return sizes


def fill(arena, regions):
    """Allocate until so many regions are there; returns their sizes in their order."""
    held, sizes = [], []
    while len(sizes) < regions:
        before = arena.stats()
        held.append(arena.allocate(before.largest_free or 1 * MIB))
        if arena.stats().num_extensions > before.num_extensions:
            sizes.append(arena.stats().reserved - before.reserved)
    return sizes


@pytest.fixture
def large_host(host):
    """No byte is touched here, so the host may pretend to have more than it has."""
    host.set_capacity(0, 1 << 42)


@pytest.mark.usefixtures("large_host")
def test_regions_double_from_1_mib_up_to_1_gib(arena):
    doubling = [MIB << step for step in range(11)]
    assert fill(arena, 13) == [*doubling, 1024 * MIB, 1024 * MIB]


@pytest.mark.usefixtures("large_host")
def test_doubling_stops_at_the_cap(make_arena):
    capped = make_arena({"max_power_of_two_extend_bytes": 32 * MIB})
    assert fill(capped, 7) == [size * MIB for size in (1, 2, 4, 8, 16, 32, 32)]


@pytest.mark.usefixtures("large_host")
def test_last_doubling_step_goes_to_a_cap_between_powers_of_two(make_arena):
    capped = make_arena({"max_power_of_two_extend_bytes": 1000 * MIB})
    assert fill(capped, 12)[8:] == [size * MIB for size in (256, 512, 1000, 1000)]


def test_large_request_doubles_until_it_fits_once(arena):
    held = arena.allocate(3 * MIB)  # by the default split rule the whole region
    assert arena.stats().reserved == 4 * MIB
    assert fill(arena, 3) == [4 * MIB, 8 * MIB, 16 * MIB]
    held.close()


@pytest.mark.usefixtures("large_host")
def test_request_above_the_cap_is_served_and_growth_returns_to_the_cap(arena):
    held = arena.allocate(3000 * MIB)
    assert arena.stats().reserved == 4096 * MIB
    assert fill(arena, 3) == [4096 * MIB, 1024 * MIB, 1024 * MIB]
    held.close()


def test_same_as_requested_adds_exactly_the_blocks_size(make_arena):
    arena = make_arena({"extend_strategy": "same_as_requested", "initial_chunk_size_bytes": MIB})
    assert grow(arena, 1, 1000, 3 * MIB) == [256, 1024, 3 * MIB]


def test_first_region_is_the_initial_chunk(make_arena):
    assert grow(make_arena({"initial_chunk_size_bytes": 25600}), 256) == [25600]


@pytest.mark.usefixtures("large_host")
def test_first_region_exceeds_2_gib_where_memory_is_that_large(make_arena):
    assert grow(make_arena({"initial_chunk_size_bytes": 3072 * MIB}), 1) == [3072 * MIB]


def test_initial_chunk_is_rounded_up_to_256_bytes(make_arena):
    assert grow(make_arena({"initial_chunk_size_bytes": 1000}), 1) == [1024]


def test_last_region_is_what_max_mem_leaves(make_arena):
    arena = make_arena({"max_mem": 10 * MIB})
    assert fill(arena, 4) == [MIB, 2 * MIB, 4 * MIB, 3 * MIB]


def test_first_region_is_bounded_by_max_mem(make_arena):
    assert grow(make_arena({"max_mem": 300 * KIB}), 1) == [300 * KIB]


def test_growth_starts_again_from_the_growth_chunk_after_a_shrink(make_arena):
    arena = make_arena({"initial_growth_chunk_size_bytes": 3 * MIB})
    assert fill(arena, 3) == [MIB, 2 * MIB, 4 * MIB]
    arena.shrink()
    assert fill(arena, 3) == [3 * MIB, 6 * MIB, 12 * MIB]


def test_persistent_blocks_do_not_influence_growth(arena):
    weights = [arena.allocate_persistent(5 * MIB) for _ in range(3)]
    assert grow(arena, MIB) == [MIB]
    del weights


# ---- a driver that refuses -----------------------------------------------------------------------


def test_refused_region_is_retried_at_nine_tenths(make_arena, leave_room, host):
    arena = make_arena({"initial_chunk_size_bytes": 64 * MIB})
    leave_room(32 * MIB)
    asked = host.call_count("cuMemAlloc")
    assert arena.allocate(MIB).nbytes == MIB
    size, steps = 64 * MIB, 1
    while size > 32 * MIB:
        size, steps = -(-(size // 10 * 9) // 256) * 256, steps + 1
    assert arena.stats().reserved == size
    assert host.call_count("cuMemAlloc") - asked == steps


def test_refused_region_is_retried_down_to_the_block(make_arena, leave_room):
    arena = make_arena({"initial_chunk_size_bytes": 64 * MIB})
    leave_room(2 * MIB)
    assert grow(arena, 2 * MIB) == [2 * MIB]


@pytest.mark.parametrize(("refusals", "region"), [(0, 8960), (1, 8192), (2, 256)])
def test_region_of_less_than_8192_bytes_is_only_the_blocks(make_arena, host, refusals, region):
    arena = make_arena({"initial_chunk_size_bytes": 8960})
    if refusals:
        host.fail("cuMemAlloc", 1, 2, refusals)
    assert grow(arena, 100) == [region]


def test_refusal_for_another_reason_is_not_retried(host, arena):
    host.fail("cuMemAlloc", 1, 1, 1)
    before = host.call_count("cuMemAlloc")
    with pytest.raises(gpumem.errors.DriverError, match="cuMemAlloc"):
        arena.allocate(100)
    assert host.call_count("cuMemAlloc") - before == 1
    assert grow(arena, 100) == [MIB]


def test_backing_off_does_not_change_the_next_region(make_arena, leave_room, host):
    arena = make_arena({"initial_chunk_size_bytes": 8 * MIB, "split_rule": "tight"})
    leave_room(4 * MIB)
    held = [arena.allocate(2 * MIB)]
    held.append(arena.allocate(arena.stats().largest_free))
    host.set_capacity(0, 1 << 40)
    assert grow(arena, MIB) == [16 * MIB]
    del held


@pytest.mark.parametrize("by", ["the device", "max_mem"])
def test_refused_request_does_not_change_the_next_region(make_arena, leave_room, by):
    arena = make_arena({"max_mem": 64 * MIB} if by == "max_mem" else {})
    if by == "the device":
        leave_room(16 * MIB)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(100 * MIB)
    assert grow(arena, 256) == [MIB]

"""Long-lived blocks in regions of their own, and what a shrink gives back and keeps."""

import gpumem

KIB, MIB = 1 << 10, 1 << 20
ARENA_CONFIG = {"backing": "regions", "split_rule": "tight"}


def test_persistent_block_has_its_own_region_of_its_size(arena):
    weights = arena.allocate_persistent(5 * MIB + 1)
    assert weights.allocated_nbytes == 5 * MIB + 256
    stats = arena.stats()
    assert (stats.reserved, stats.in_use) == (5 * MIB + 256, 5 * MIB + 256)
    assert (stats.num_regions, stats.num_reserves, stats.num_allocs) == (1, 1, 1)
    assert (stats.num_extensions, stats.largest_free) == (0, 0)


def test_reserve_is_allocate_persistent(arena):
    weights = arena.allocate_persistent(1000)
    assert (weights.nbytes, arena.stats().num_reserves) == (1000, 1)


def test_freed_persistent_block_is_not_reused(arena):
    arena.allocate_persistent(MIB).close()
    assert arena.stats().largest_free == 0
    buffer = arena.allocate(MIB)
    assert arena.stats().num_extensions == 1
    assert arena.stats().reserved == MIB, "its region went back"
    del buffer


def test_finalizer_of_a_persistent_block_makes_no_driver_call(arena, host):
    weights = arena.allocate_persistent(MIB)
    calls = host.call_count()
    del weights
    assert host.call_count() == calls
    assert arena.stats().num_regions == 1
    assert arena.shrink().released_bytes == MIB
    assert arena.stats().num_regions == 0


def test_shrink_leaves_persistent_blocks_alone(arena):
    weights = arena.allocate_persistent(MIB)
    memoryview(weights)[:4] = b"keep"
    arena.allocate(2 * MIB).close()
    report = arena.shrink()
    assert report.released_bytes == 2 * MIB
    assert [(kept.address, kept.allocated_nbytes) for kept in report.retained] == [
        (weights.ptr, MIB)
    ]
    assert bytes(memoryview(weights)[:4]) == b"keep"


def test_shrink_releases_every_region_without_a_live_block(make_arena):
    arena = make_arena({"extend_strategy": "same_as_requested", "split_rule": "tight"})
    buffers = [arena.allocate(MIB) for _ in range(6)]
    for buffer in buffers[::2]:
        buffer.close()
    report = arena.shrink()
    assert report.released_bytes == 3 * MIB
    assert {kept.address for kept in report.retained} == {buffer.ptr for buffer in buffers[1::2]}
    assert arena.stats().num_shrinkages == 3
    buffers.clear()


def test_shrink_reports_the_live_blocks_that_retain_a_region(make_arena):
    arena = make_arena({"split_rule": "tight"})
    held = [arena.allocate(1000), arena.allocate(5000)]
    arena.allocate(10_000).close()
    (kept,) = arena.shrink().retained
    assert (kept.address, kept.allocated_nbytes) == (held[0].ptr, MIB)
    assert kept.reason == "2 live blocks of 6.0 KiB"
    assert [block.address for block in kept.blocks] == [buffer.ptr for buffer in held]
    assert [block.nbytes for block in kept.blocks] == [1000, 5000]
    assert all(block.used and block.stream == 1 for block in kept.blocks)
    del held[1]
    (kept,) = arena.shrink().retained
    assert kept.reason == "1 live block of 1.0 KiB"
    held.clear()


def test_shrink_of_an_empty_arena_releases_nothing(arena):
    assert arena.shrink() == gpumem.ShrinkReport(0, ())


def test_repeated_shrinks_change_nothing(arena):
    reserved = []
    for _ in range(4):
        held = [arena.allocate(100 * KIB) for _ in range(30)]
        reserved.append(arena.stats().reserved)
        held.clear()
        arena.shrink()
        assert arena.stats().reserved == 0
    assert len(set(reserved[1:])) == 1  # the first grew from the initial chunk

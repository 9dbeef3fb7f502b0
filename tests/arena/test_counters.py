"""What an arena counts: each call of the driver, and each allocation and free, once."""

from contextlib import suppress

import pytest
from helpers.driver import HostDriver

import gpumem

MIB = 1 << 20
INVALID_VALUE = 1
CALLS = (
    *("cuMemAlloc", "cuMemFree", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate"),
    *("cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemGetInfo"),
    *("cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"),
)


@pytest.mark.parametrize("refused", [None, "cuMemMap", "cuMemSetAccess"])
def test_driver_calls_of_a_paged_arena_are_each_counted_once(make_arena, host, refused):
    stream, other = gpumem.Stream("host"), gpumem.Stream("host")
    arena = make_arena({"backing": "virtual", "page_move_threshold": 0})
    before = sum(map(host.call_count, CALLS))

    def require_counted():
        made = sum(map(host.call_count, CALLS)) - before
        assert arena.stats().driver_calls == made

    blocks = [arena.allocate(nbytes * MIB, stream) for nbytes in (4, 2, 6, 2)]
    require_counted()
    del blocks[::2]
    if refused is not None:
        host.fail(refused, 1, INVALID_VALUE)
    with suppress(gpumem.errors.DriverError):
        blocks.append(arena.allocate(9 * MIB, stream))  # pages move
    assert host.last_fault() == refused
    host.clear_faults()
    require_counted()
    blocks.append(arena.allocate(300 * MIB, stream))
    require_counted()
    kept = arena.allocate_persistent(MIB)
    require_counted()
    kept.close()
    blocks.pop()
    blocks.append(arena.allocate(20 * MIB, other))
    require_counted()
    arena.shrink()
    require_counted()
    blocks.clear()
    arena.shrink()
    require_counted()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_block_that_recorded_streams_use_counts_as_freed_once(make_arena, backing):
    stream, other = gpumem.Stream("host"), gpumem.Stream("host")
    arena = make_arena({"backing": backing, "stream_reuse": "wait"})
    for made in range(1, 4):
        with HostDriver().block(other):
            block = arena.allocate(4 * MIB, stream)
            block.record_stream(other)
            block.close()
            assert (arena.stats().num_allocs, arena.stats().num_frees) == (made, made)
            assert (arena.stats().in_use, arena.stats().requested_in_use) == (0, 0)
        other.synchronize()

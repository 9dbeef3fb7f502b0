"""Regions go back to a GPU's driver while a stream is held that they have nothing to do with.

The gate opens by itself after a minute: a call that waits for it ends, and the test fails.
"""

import gc

import numpy as np
import pytest
from helpers.legacy_ipc import double_in_a_child, legacy_handle

import gpumem
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
POLICIES = ["completed", "wait", "never"]
REGIONS = {"backing": "regions", "extend_strategy": "same_as_requested", "split_rule": "tight"}


@pytest.fixture
def streams():
    return [gpumem.Stream("cuda:0") for _ in range(3)]


@pytest.fixture
def held(gate, streams):
    """Hold streams[0]. What earlier tests dropped must not go back in a shrink: that waits."""
    gc.collect()
    release_retired()
    gate.hold(streams[0])
    yield gate
    gate.open()
    for stream in streams:
        stream.synchronize()


def free_behind(arena, driver, stream, nbytes=64 * MIB):
    buffer = arena.allocate(nbytes, stream)
    driver.call(driver.cuMemsetD8Async, buffer.ptr, 1, nbytes, stream.ptr)
    buffer.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wait_ms", [0, 50])
def test_allocate_leaves_a_region_with_unfinished_work(driver, streams, held, policy, wait_ms):
    config = {"max_mem": 96 * MIB, "stream_reuse": policy, "oom_wait_ms": wait_ms}
    with gpumem.Arena("cuda:0", REGIONS | config) as arena:
        free_behind(arena, driver, streams[0])
        for stream in streams[:2]:
            with pytest.raises(gpumem.OutOfMemoryError):
                arena.allocate(96 * MIB, stream)
        assert not held.is_open
        held.open()
        streams[0].synchronize()
        arena.allocate(96 * MIB, streams[1]).close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wait_ms", [0, 50])
def test_regions_go_back_beside_a_stream_their_arena_never_saw(
    driver, streams, held, policy, wait_ms
):
    config = {"max_mem": 96 * MIB, "stream_reuse": policy, "oom_wait_ms": wait_ms}
    arena = gpumem.Arena("cuda:0", REGIONS | config)
    free_behind(arena, driver, streams[1])
    streams[1].synchronize()
    arena.allocate(96 * MIB, streams[2]).close()
    assert arena.shrink().released_bytes == 96 * MIB
    free_behind(arena, driver, streams[1])
    arena.close()
    assert not held.is_open


def test_memory_of_a_released_region_serves_all_streams_at_once(driver, streams, held):
    arena = gpumem.Arena("cuda:0", REGIONS)
    arena.allocate(MIB, streams[1]).close()
    arena.shrink()  # what the driver makes for the first one
    arena.allocate(256 * MIB, streams[1]).close()
    before, _ = driver.call(driver.cuMemGetInfo)
    arena.shrink()
    after, _ = driver.call(driver.cuMemGetInfo)
    assert after - before == 256 * MIB
    assert not held.is_open
    arena.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_shrink_leaves_a_region_with_unfinished_work(driver, streams, held, policy):
    with gpumem.Arena("cuda:0", REGIONS | {"stream_reuse": policy}) as arena:
        free_behind(arena, driver, streams[0])
        assert arena.shrink().released_bytes == 0
        assert not held.is_open
        held.open()
        streams[0].synchronize()
        assert arena.shrink().released_bytes == 64 * MIB


def test_close_waits_for_the_streams_of_its_arena(driver, streams, held):
    arena = gpumem.Arena("cuda:0", REGIONS)
    free_behind(arena, driver, streams[0])
    held.open_after(0.05)
    arena.close()
    assert held.is_open
    assert streams[0].query()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_dropped_arena_with_unfinished_work_delays_no_other(driver, streams, held, backing):
    dropped = gpumem.Arena("cuda:0", {"backing": backing})
    free_behind(dropped, driver, streams[0])
    before, _ = driver.call(driver.cuMemGetInfo)
    del dropped
    with gpumem.Arena("cuda:0", REGIONS) as arena:
        arena.allocate(MIB, streams[1]).close()
    assert not held.is_open
    held.open()
    streams[0].synchronize()
    release_retired()
    after, _ = driver.call(driver.cuMemGetInfo)
    assert after - before >= 64 * MIB


@pytest.mark.parametrize("backing", ["regions", "virtual"])
@pytest.mark.parametrize("wait_ms", [0, 50])
def test_allocation_leaves_dropped_pinned_memory(streams, held, wait_ms, backing):
    """Its free waits for every stream."""
    budget = gpumem.Budget(64 * MIB)
    buffer = gpumem.Arena("cuda:0/host_accessible", budget=budget).allocate(8)
    charged = budget.used
    with gpumem.Arena(
        "cuda:0", {"backing": backing, "max_mem": 64 * MIB, "oom_wait_ms": wait_ms}
    ) as arena:
        kept = arena.allocate(32 * MIB, streams[1])
        del buffer
        arena.allocate(16 * MIB, streams[1]).close()
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(64 * MIB, streams[1])
        assert budget.used == charged > 0
        kept.close()
    assert not held.is_open
    held.open()
    gpumem.Device("cuda:0").free_bytes  # noqa: B018  # may wait
    assert budget.used == 0


@pytest.mark.parametrize("made", ["for ipc", "registered", "neither"])
def test_memory_that_another_process_had_open_is_released(driver, made):
    arena = gpumem.Arena("cuda:0", REGIONS)
    free = []
    for _ in range(3):
        buffer = arena.allocate(64 * MIB, transport="ipc" if made == "for ipc" else None)
        driver.call(driver.cuMemsetD8, buffer.ptr, 1, 64 * MIB)
        handle = legacy_handle(buffer.ptr)
        assert isinstance(handle, str), handle
        if made == "registered":
            with buffer.register():
                double_in_a_child(handle)
        else:
            double_in_a_child(handle)
        found = np.empty(256, np.uint8)
        driver.call(driver.cuMemcpyDtoH, found.ctypes.data, buffer.ptr, 256)
        assert (found == 2).all()
        buffer.close()
        gpumem.Device("cuda:0").synchronize()
        assert arena.shrink().released_bytes == 64 * MIB
        free.append(driver.call(driver.cuMemGetInfo)[0])
    assert free[2] > free[1] - 64 * MIB  # before, the driver may have made something that stays
    arena.close()


@pytest.mark.parametrize("mode", [0, 1, 2])  # global, thread local, relaxed
def test_region_is_released_under_a_capture(driver, streams, mode):
    arena = gpumem.Arena("cuda:0", REGIONS)
    arena.allocate(64 * MIB, streams[1]).close()
    mode = driver.CUstreamCaptureMode(mode)
    driver.call(driver.cuStreamBeginCapture, streams[2].ptr, mode)
    assert arena.shrink().released_bytes == 64 * MIB
    graph = driver.call(driver.cuStreamEndCapture, streams[2].ptr)
    driver.call(driver.cuGraphDestroy, graph)
    arena.close()

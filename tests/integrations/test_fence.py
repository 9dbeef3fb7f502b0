"""Blocks for callers without streams: unused when allocated, freed after all work."""

import threading

import numpy as np
import pytest
from helpers.driver import HostDriver

import gpumem
from gpumem._testing import host_device
from gpumem._testing.integrations import Fence
from gpumem.integrations.numba import _fence
from gpumem.interop import HostTimeline

MIB = 1 << 20


def fill(buffer, value, stream):
    HostDriver().fill(buffer, value, gpumem.Stream.from_handle("host", stream))


@pytest.fixture(params=["cuCtxRecordEvent", "cuEventRecord"])
def call(request, monkeypatch):
    """The driver's function by which a free waits: the second one serves older drivers."""
    if request.param == "cuEventRecord":
        monkeypatch.setattr(_fence, "record_all_work", lambda event: False)
    return request.param


@pytest.fixture
def fence(call):
    return Fence(gpumem.Device("host"))


@pytest.fixture(params=["completed", "wait", "never"])
def arena(request):
    with gpumem.Arena("host", {"stream_reuse": request.param, "max_mem": 8 * MIB}) as arena:
        yield arena
        arena.check_invariants()


@pytest.fixture
def slow():
    """Every stream finishes its work 50 ms after it was queued."""
    host_device.set_lag(50_000_000)
    yield
    host_device.set_lag(0)


def test_fence_blocks_are_allocated_and_freed(fence, arena):
    for _ in range(3):
        buffer = fence.allocate(arena, MIB)
        np.from_dlpack(buffer)[:] = 1
        fence.free(buffer)
        assert buffer.closed
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("stream", [0, 2])
def test_block_is_reused_after_work_queued_before_its_free(fence, stream):
    config = {"initial_chunk_size_bytes": 4 * MIB, "max_mem": 4 * MIB, "oom_wait_ms": 3_600_000}
    with gpumem.Arena("host", config) as arena, arena.allocate(256):
        # The remainder of the only region holds one such block, and the region stays.
        buffer = fence.allocate(arena, 3 * MIB)
        address = buffer.ptr
        np.from_dlpack(buffer)[:] = 0
        gate = HostTimeline.create()
        gpumem.Stream.from_handle("host", stream).wait(gate.point(1))
        fill(buffer, 7, stream)
        fence.free(buffer)
        opener = threading.Timer(0.1, gate.signal, [1])
        opener.start()
        again = fence.allocate(arena, 3 * MIB)
        seen = np.from_dlpack(again)
        assert again.ptr == address
        assert seen.min() == seen.max() == 7, "handed out before the fill was done"
        opener.join()
        del seen
        fence.free(again)


def test_block_freed_by_another_stream_is_complete_before_reuse(fence, arena, slow, stream):
    buffer = arena.allocate(3 * MIB, stream)
    address = buffer.ptr
    view = np.from_dlpack(buffer)
    fill(buffer, 7, stream.ptr)
    del view
    buffer.close()
    again = fence.allocate(arena, 3 * MIB)
    if again.ptr == address:
        assert np.from_dlpack(again).min() == 7
    fence.free(again)


def test_failed_fence_retains_the_block_until_a_later_call(fence, arena, call):
    buffer = fence.allocate(arena, MIB)
    host_device.fail(call, 1, 1)
    try:
        fence.free(buffer)
    finally:
        host_device.clear_faults()
    assert not buffer.closed
    fence.free(fence.allocate(arena, MIB))
    assert buffer.closed
    assert arena.stats().in_use == 0


def test_drain_frees_everything(fence, arena, slow):
    buffer = fence.allocate(arena, MIB)
    fill(buffer, 1, 0)
    fence.free(buffer)
    fence.drain()
    assert fence._free_stream.query()
    assert arena.stats().in_use == 0


def test_free_waits_for_a_stream_that_does_not_wait_for_the_legacy_stream(arena):
    fence, stream = Fence(gpumem.Device("host")), gpumem.Stream("host")
    buffer = fence.allocate(arena, MIB)
    with HostDriver().block(stream):
        fence.free(buffer)
        assert not fence._free_stream.query()
    fence.drain()
    assert fence._free_stream.query()

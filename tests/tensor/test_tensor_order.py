"""Who waits for what: late streams, seen through NumPy and through a consumer's stream."""

import numpy as np
import pytest

import gpumem

LATE = 20_000_000  # nanoseconds
VIEWS = {
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": np.asarray,
    "memoryview": lambda tensor: np.asarray(memoryview(tensor)),
    "dlpack": np.from_dlpack,
}


@pytest.fixture
def late(host):
    host.set_lag(LATE)
    return gpumem.Stream("host")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("memory", ["host", "host/host_accessible", "host/managed"])
def test_cpu_views_wait_for_queued_work(late, view, memory):
    tensor = gpumem.full(1000, 7, "i4", memory=memory, stream=late)
    assert (VIEWS[view](tensor) == 7).all()
    copy = tensor.to("host", late, copy=True)
    assert (VIEWS[view](copy) == 7).all()


def test_sync_false_does_not_wait(late, host):
    host.use_virtual_clock(True)  # the fill is never done by itself
    tensor = gpumem.full(1000, 7, "i4", memory="host", stream=late)
    array = tensor.numpy(sync=False)
    assert not late.query()
    host.advance_clock(LATE)
    late.synchronize()
    assert (array == 7).all()


def test_consumers_stream_waits_for_the_buffers(late, host):
    tensor = gpumem.full(1000, 7, "i4", memory="host/managed", stream=late)
    consumer = gpumem.Stream("host")
    host.set_lag(0)
    assert consumer.query()
    capsule = tensor.__dlpack__(stream=consumer.ptr, max_version=(1, 0))
    consumer.synchronize()
    assert late.query()
    del capsule


def test_cpu_write_waits_for_old_work_of_a_reused_block(late, arena):
    old = gpumem.full(1000, 7, "i4", resource=arena, stream=late)
    address = old.ptr
    del old
    new = gpumem.empty(1000, "i4", resource=arena, stream=late)
    assert new.ptr == address
    new.numpy()[:] = 1
    late.synchronize()
    assert (new.numpy() == 1).all()

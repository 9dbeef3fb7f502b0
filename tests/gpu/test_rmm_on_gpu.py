"""RMM on gpumem's memory, on a GPU, and the other way round."""

import gc

import numpy as np
import pytest
from helpers import child
from helpers.single_block import BLOCK, next_address, single_block_arena

import gpumem
import gpumem.integrations.rmm as integration

rmm = pytest.importorskip("rmm", reason="RMM is not installed")

MIB = 1 << 20


def test_rmm_buffers_come_from_the_arena_and_are_freed(arena):
    before = rmm.mr.get_per_device_resource(0)
    integration.enable(arena)
    kept = rmm.DeviceBuffer.to_device(np.arange(1000, dtype=np.uint8).tobytes())
    integration.disable()
    assert rmm.mr.get_per_device_resource(0) is before
    assert arena.stats().requested_in_use == 1000
    assert np.array_equal(kept.copy_to_host(), np.arange(1000, dtype=np.uint8))
    del kept
    gc.collect()
    assert arena.stats().in_use == 0


def test_block_belongs_to_the_stream_that_rmm_names(arena):
    stream = rmm.pylibrmm.stream.Stream()
    with integration.using(arena):
        for _ in range(100):
            buffer = rmm.DeviceBuffer(size=MIB, stream=stream)
            del buffer
    assert arena.stats().num_frees == 100
    stream.synchronize()
    arena.reset_stream(stream)


def test_block_freed_on_another_stream_is_reused_there_at_once_and_elsewhere_later(
    make_arena, gate
):
    arena, pin = single_block_arena(lambda config: make_arena(config, "cuda:0"))
    source = integration.allocator(arena)
    own, freeing = rmm.pylibrmm.stream.Stream(), rmm.pylibrmm.stream.Stream()
    address = source.allocate(BLOCK, own)
    gate.hold(freeing.__cuda_stream__()[1])
    source.deallocate(address, BLOCK, freeing)
    assert next_address(arena, own) is None
    assert next_address(arena, freeing) == address
    gate.open()
    freeing.synchronize()
    assert next_address(arena, own) == address
    pin.close()


def test_out_of_memory_is_rmms_error_and_runs_its_failure_callback():
    arena = gpumem.Arena("cuda:0", {"max_mem": 64 * MIB})
    called = []
    with integration.using(arena):
        with pytest.raises(MemoryError):
            rmm.DeviceBuffer(size=65 * MIB)
        source = rmm.mr.FailureCallbackResourceAdaptor(
            rmm.mr.get_per_device_resource(0), lambda size: bool(called.append(size))
        )
        with pytest.raises(MemoryError):
            source.allocate(65 * MIB)
    assert called == [65 * MIB]


def test_driver_pool_is_passed_by_its_handle():
    pool = gpumem.DriverPool("cuda:0")
    with integration.using(pool):
        source = rmm.mr.get_per_device_resource(0)
        assert isinstance(source, rmm.mr.CudaAsyncViewMemoryResource)
        assert source.pool_handle() == pool.handle
        buffer = rmm.DeviceBuffer(size=MIB)
        assert pool.stats().reserved >= MIB
        del buffer
    view = integration.allocator(pool)
    address = view.allocate(MIB)
    view.deallocate(address, MIB)


@pytest.mark.parametrize("kind", ["CudaAsyncMemoryResource", "PoolMemoryResource"])
def test_rmm_resource_serves_gpumem(kind):
    source = rmm.mr.CudaAsyncMemoryResource()
    if kind == "PoolMemoryResource":
        source = rmm.mr.PoolMemoryResource(source, initial_pool_size=64 * MIB)
    resource = integration.resource(source)
    tensor = gpumem.full((1000,), 2, "float32", resource=resource)
    assert float(tensor.to("host").numpy().sum()) == 2000
    del tensor
    gc.collect()
    assert resource.stats().in_use == 0


@pytest.mark.parametrize("end", ["", "del arena", "integration.disable()", "del buffer"])
def test_exit_is_quiet(end):
    child.run_quietly(f"""
import warnings
warnings.simplefilter("ignore")
import rmm, gpumem, gpumem.integrations.rmm as integration
arena = gpumem.Arena("cuda:0")
integration.enable(arena)
buffer = rmm.DeviceBuffer(size=1000)
{end}
""")

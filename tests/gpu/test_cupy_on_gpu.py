"""CuPy's arrays in gpumem's memory, on a GPU."""

import gc
import pickle

import numpy as np
import pytest

import gpumem
import gpumem.integrations.cupy as integration
from gpumem.errors import IntegrationError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

MIB = 1 << 20


@pytest.fixture
def arena():
    arena = gpumem.Arena("cuda:0")
    yield arena
    gc.collect()
    cupy.cuda.Device(0).synchronize()
    arena.check_invariants()
    arena.close()


@pytest.fixture
def enabled(arena):
    with integration.using(arena):
        yield arena


def test_cupy_allocates_through_its_own_interface():
    parts = integration._parts()
    assert parts.current.compiled
    assert parts.maker.fills_in


def test_cupy_arithmetic_runs_in_the_arena(enabled):
    a = cupy.arange(1 << 20, dtype=cupy.float32)
    assert a.data.mem._owner.resource is enabled
    assert isinstance(a.data.mem, cupy.cuda.UnownedMemory)
    b = (a * 2 + 1).reshape(1024, 1024)
    assert float(b.sum()) == pytest.approx(float(np.arange(1 << 20).sum() * 2 + (1 << 20)))
    assert cupy.array_equal((b @ cupy.eye(1024, dtype=cupy.float32)), b)
    assert enabled.stats().in_use > 4 * MIB
    del a, b
    gc.collect()


def test_cupy_slices_and_views_keep_the_memory(enabled):
    a = cupy.arange(1000)
    part = a[10:20]
    del a
    gc.collect()
    assert cupy.asnumpy(part).tolist() == list(range(10, 20))


def test_block_belongs_to_cupys_current_stream(enabled):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a = cupy.zeros(MIB, cupy.uint8)
    assert a.data.mem._owner.stream.ptr == stream.ptr
    assert cupy.zeros(1).data.mem._owner.stream.ptr in (0, 1)


def test_cupy_stream_may_be_dropped_before_its_arrays(enabled):
    for _ in range(40):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            a = cupy.zeros(MIB, cupy.uint8)
            a += 1
        del stream
        b = cupy.ones(MIB, cupy.uint8)
        del a, b
    gc.collect()
    cupy.cuda.Device(0).synchronize()


def test_freed_block_is_not_reused_by_another_stream_early(enabled, gate):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a = cupy.zeros(8 * MIB, cupy.uint8)
        stream.synchronize()
        gate.hold(stream.ptr)
        a += 7
        address = a.data.ptr
        del a
    b = cupy.zeros(8 * MIB, cupy.uint8)
    assert b.data.ptr != address
    gate.open()
    stream.synchronize()
    assert int(b.sum()) == 0


def test_out_of_memory_is_cupys_and_gpumems_error():
    arena = gpumem.Arena("cuda:0", {"max_mem": 64 * MIB})
    with integration.using(arena, pinned=False):
        for caught in (
            cupy.cuda.memory.OutOfMemoryError,
            cupy.cuda.runtime.CUDARuntimeError,
            gpumem.OutOfMemoryError,
        ):
            with pytest.raises(caught) as error:
                cupy.empty(65 * MIB, cupy.uint8)
        assert error.value.status == 2
        assert error.value.requested_nbytes == 65 * MIB
        assert pickle.loads(pickle.dumps(error.value)).requested_nbytes == 65 * MIB
        assert cupy.zeros(10).sum() == 0


def test_cupys_pool_over_gpumem_frees_and_retries():
    arena = gpumem.Arena("cuda:0", {"max_mem": 64 * MIB, "split_rule": "tight"})
    pool = cupy.cuda.MemoryPool(integration.allocator(arena))
    with cupy.cuda.using_allocator(pool.malloc):
        a = cupy.zeros(40 * MIB, cupy.uint8)
        del a
        b = cupy.zeros(50 * MIB, cupy.uint8)  # only if the pool gives its 40 back
        assert int(b.sum()) == 0
        del b
        pool.free_all_blocks()
    assert arena.stats().in_use == 0


def test_cupys_using_allocator_is_per_thread(enabled):
    other = gpumem.Arena("cuda:0")
    with cupy.cuda.using_allocator(integration.allocator(other)):
        a = cupy.zeros(10)
        assert a.data.mem._owner.resource is other
        with pytest.raises(IntegrationError, match="using_allocator"):
            integration.using(other).__enter__()
    assert cupy.zeros(10).data.mem._owner.resource is enabled


def test_disable_restores_cupys_pool(arena):
    before = cupy.cuda.get_allocator()
    integration.enable(arena)
    kept = cupy.ones(1000)
    integration.disable()
    assert cupy.cuda.get_allocator() == before
    assert type(cupy.zeros(10).data.mem).__name__ == "PooledMemory"
    assert float(kept.sum()) == 1000
    assert arena.stats().requested_in_use == 8000


def test_cupy_pinned_memory_comes_from_gpumem(enabled):
    memory = cupy.cuda.alloc_pinned_memory(MIB)
    resource = memory.mem.buffer.resource
    assert resource.memory.kind is gpumem.MemoryKind.HOST_ACCESSIBLE
    source = np.frombuffer(memory, np.uint8, MIB)
    source[:] = 9
    a = cupy.empty(MIB, cupy.uint8)
    a.set(source)
    assert int(a.min()) == int(a.max()) == 9
    assert cupy.asnumpy(a).min() == 9


@pytest.mark.filterwarnings("ignore")
def test_captured_graph_keeps_its_memory(enabled):
    kernel = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * 2 + 1", "twice")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        source = cupy.zeros(MIB, cupy.float32)
        result = cupy.zeros(MIB, cupy.float32)
        kernel(source, result)  # compiled before the capture
        warm = cupy.empty(MIB, cupy.float32)
        address = warm.data.ptr
        del warm
        stream.begin_capture()
        between = cupy.empty(MIB, cupy.float32)
        kernel(source, between)
        kernel(between, result)
        inside = between.data.ptr
        del between
        graph = stream.end_capture()
    assert inside != address, "a block of the arena would be given to others between launches"
    with stream:
        source.fill(3)
        others = [cupy.full(MIB, 5, cupy.float32) for _ in range(4)]
        graph.launch(stream)
        stream.synchronize()
    assert float(result.min()) == float(result.max()) == 15
    assert all(float(each.min()) == 5 for each in others)
    del graph, others, source, result


def test_managed_memory_serves_cupy():
    arena = gpumem.Arena("cuda:0/managed")
    with integration.using(arena, pinned=False):
        a = cupy.arange(1000)
        assert int(a.sum()) == 499500
    del a


def test_torch_sees_cupys_array_in_place(enabled):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    a = cupy.arange(100, dtype=cupy.float32)
    tensor = torch.from_dlpack(a)
    assert tensor.data_ptr() == a.data.ptr
    assert float(tensor.sum()) == 4950

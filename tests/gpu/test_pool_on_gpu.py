"""DriverPool and ExternalAllocator on a CUDA device."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing

import pytest
from helpers.threads import in_a_thread

import gpumem

MIB = 1 << 20


@pytest.fixture
def pool():
    with gpumem.DriverPool("cuda:0") as pool:
        yield pool


def fill(driver, buffer, value, stream=0):
    driver.call(driver.cuMemsetD8Async, buffer.ptr, value, buffer.nbytes, stream)


def read(driver, buffer) -> set[int]:
    there = bytearray(buffer.nbytes)
    driver.call(driver.cuMemcpyDtoH, there, buffer.ptr, buffer.nbytes)
    return set(there)


def test_pool_blocks_hold_their_bytes_and_are_freed(pool, driver):
    with pool.allocate(MIB) as buffer:
        fill(driver, buffer, 7)
        assert read(driver, buffer) == {7}
        assert pool.stats().in_use == MIB
    driver.call(driver.cuCtxSynchronize)
    stats = pool.stats()
    assert (stats.in_use, stats.num_frees, stats.driver_calls) == (0, 1, 2)


@pytest.mark.parametrize("alignment", [256, 512, 4096, 1 << 21])
def test_pool_blocks_have_the_requested_alignment(pool, alignment):
    held = [pool.allocate(1000 + i, alignment=alignment) for i in range(20)]
    assert all(buffer.ptr % alignment == 0 for buffer in held)


def test_pool_options_are_accepted_and_read_back():
    config = gpumem.PoolConfig(
        release_threshold=1 << 30,
        reuse_follow_event_dependencies=False,
        reuse_allow_opportunistic=False,
        reuse_allow_internal_dependencies=False,
    )
    with gpumem.DriverPool("cuda:0", config) as pool:
        guest = gpumem.DriverPool("cuda:0", handle=pool.handle)
        assert guest.config == config
        guest.close()


def test_pool_limit_is_enforced():
    with gpumem.DriverPool("cuda:0", {"max_size": 64 * MIB}) as pool:
        with pytest.raises(gpumem.OutOfMemoryError) as caught:
            pool.allocate(256 * MIB)
        assert (caught.value.requested_nbytes, caught.value.limit) == (256 * MIB, 64 * MIB)
        pool.allocate(MIB).close()


def test_shrink_keeps_the_requested_bytes():
    config = {"release_threshold": 1 << 40, "bytes_to_keep_on_shrink": 64 * MIB}
    with gpumem.DriverPool("cuda:0", config) as pool:
        pool.allocate(256 * MIB).close()
        gpumem.Device("cuda:0").synchronize()
        report = pool.shrink()
        stats = pool.stats()
        assert report.released_bytes >= 128 * MIB
        assert stats.num_shrinkages == 1
        assert stats.reserved >= 0


@pytest.mark.parametrize("adopt", [gpumem.DriverPool.default, gpumem.DriverPool.current])
def test_default_and_current_pool_are_used_and_not_destroyed(adopt, driver):
    pool = adopt("cuda:0")
    handle = pool.handle
    with pool.allocate(MIB) as buffer:
        fill(driver, buffer, 1)
        assert read(driver, buffer) == {1}
    pool.close()
    assert adopt("cuda:0").handle == handle


def test_reset_stream_may_be_destroyed_before_its_blocks_are_freed(pool, driver):
    stream = driver.call(driver.cuStreamCreate, 1)
    buffer = pool.allocate(MIB, int(stream))
    fill(driver, buffer, 1, stream)
    driver.call(driver.cuStreamSynchronize, stream)
    pool.reset_stream(int(stream))
    driver.call(driver.cuStreamDestroy, stream)
    buffer.close()
    driver.call(driver.cuCtxSynchronize)
    assert pool.stats().in_use == 0
    pool.allocate(MIB).close()


def test_stream_object_lives_as_long_as_a_block_on_it(pool, driver):
    buffer = pool.allocate(MIB, gpumem.Stream("cuda:0"))
    gc.collect()
    fill(driver, buffer, 1, buffer.stream.ptr)
    buffer.close()
    driver.call(driver.cuCtxSynchronize)


def test_from_config_makes_a_pool():
    config = {"ep.cuda.arena.use_cuda_mempool": "1", "arena.max_mem": str(1 << 30)}
    with gpumem.MemoryResource.from_config("cuda:0", config) as resource:
        assert isinstance(resource, gpumem.DriverPool)
        resource.allocate(MIB).close()


# ---- other processes -----------------------------------------------------------------------------


def other(connection):
    """Run in a spawned process: look at a buffer of its parent's pool, and write it."""
    from cuda.bindings import driver

    gpumem.Device("cuda:0").synchronize()
    (_, device), (_, context) = driver.cuDeviceGet(0), driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(context)
    handle, note = connection.recv()
    there = gpumem.DriverPool.import_handle("cuda:0", handle)
    handle.close()
    first, second = there.import_buffer(note), there.import_buffer(note)
    assert first.ptr == second.ptr
    first.close()
    seen = bytearray(second.nbytes)
    assert driver.cuMemcpyDtoH(seen, second.ptr, second.nbytes)[0] == 0
    assert driver.cuMemsetD8Async(second.ptr, 9, second.nbytes, 0)[0] == 0
    gpumem.Device("cuda:0").synchronize()
    second.close()
    gpumem.Device("cuda:0").synchronize()
    stats = there.stats()
    there.close()
    connection.send((set(seen), stats.in_use, stats.num_frees, device == 0))


def test_other_process_reads_and_writes_the_same_bytes(driver):
    context = multiprocessing.get_context("spawn")
    mine, yours = context.Pipe()
    with gpumem.DriverPool("cuda:0", {"shareable": True}) as pool:
        with pool.allocate(MIB, alignment=4096) as buffer, pool.export_handle() as handle:
            fill(driver, buffer, 7)
            driver.call(driver.cuCtxSynchronize)
            process = context.Process(target=other, args=(yours,))
            process.start()
            mine.send((handle, pool.export_buffer(buffer)))
            assert mine.poll(120), "the other process said nothing"
            seen, in_use, frees, _ = mine.recv()
            process.join(60)
            assert (seen, in_use, frees, process.exitcode) == ({7}, 0, 2, 0)
            assert read(driver, buffer) == {9}
        driver.call(driver.cuCtxSynchronize)


def test_export_of_an_unshareable_pool_names_the_option(pool):
    with pytest.raises(gpumem.ConfigError, match="shareable"):
        pool.export_handle()


# ---- external allocators -------------------------------------------------------------------------


def test_external_allocator_over_driver_callbacks(driver):
    freed = []

    def free(address):
        driver.call(driver.cuMemFree, address)
        freed.append(address)

    with gpumem.ExternalAllocator(
        lambda n: int(driver.call(driver.cuMemAlloc, n)), free, memory="cuda:0"
    ) as allocator:
        stream = gpumem.Stream("cuda:0")
        with allocator.allocate(MIB) as buffer, allocator.allocate(MIB, stream) as other_buffer:
            fill(driver, buffer, 5)
            assert read(driver, buffer) == {5}
            fill(driver, other_buffer, 6, stream.ptr)
            addresses = {buffer.ptr, other_buffer.ptr}
        stream.synchronize()
        assert allocator.stats().reserved == 0
    assert set(freed) == addresses


def test_pytorchs_allocator_serves_as_an_external_allocator(driver):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    alloc, free, empty = (torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete,
                          torch.cuda.empty_cache)  # fmt: skip
    with gpumem.ExternalAllocator(alloc, free, empty, memory="cuda:0") as allocator:
        with allocator.allocate(MIB) as buffer:
            fill(driver, buffer, 5)
            assert read(driver, buffer) == {5}
            assert torch.cuda.memory_allocated() >= MIB
        allocator.allocate_persistent(MIB).close()
        with pytest.raises(torch.OutOfMemoryError):
            allocator.allocate(1 << 44)
        assert allocator.stats().in_use == 0


def test_context_is_current_on_a_new_thread():

    from cuda.bindings import driver

    seen = []

    def alloc(nbytes):
        seen.append(int(driver.cuCtxGetCurrent()[1]))
        return ctypes.addressof(block)

    block = ctypes.create_string_buffer(100)
    with gpumem.ExternalAllocator(
        alloc, lambda p: None, memory="cuda:0/host_accessible"
    ) as allocator:
        in_a_thread(lambda: allocator.allocate(10).close())
    assert seen
    assert seen[0] != 0

"""DriverPool: the driver's stream-ordered pool behind the same Buffer."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.threads import in_a_thread, in_threads

import gpumem

MIB = 1 << 20
OUT_OF_MEMORY, NOT_SUPPORTED, UNKNOWN = 2, 801, 999


@pytest.fixture
def pool():
    with gpumem.DriverPool("host") as pool:
        yield pool


def collect() -> int:
    """Let go of everything that nobody refers to."""
    gc.collect()
    return gpumem.Device("host").free_bytes


def pools_and_streams(host) -> tuple[int, int, int]:
    live = host.live()
    return live["pools"], live["streams"], live["events"]


def test_block_holds_its_bytes_and_is_freed_by_close(pool):
    with pool.allocate(MIB) as buffer:
        np.frombuffer(buffer, np.uint8)[:] = 7
        assert (np.from_dlpack(buffer) == 7).all()
        assert pool.stats().in_use >= MIB
        assert pool.stats().requested_in_use == MIB
    assert pool.stats().requested_in_use == 0
    assert (pool.stats().num_allocs, pool.stats().num_frees) == (1, 1)


def test_dropping_the_buffer_frees_the_block(pool):
    buffer = pool.allocate(4096)
    del buffer
    assert pool.stats().num_frees == 1


def test_view_keeps_the_block_without_buffer_and_pool():
    pool = gpumem.DriverPool("host")
    view = np.from_dlpack(pool.allocate(4096))
    view[:] = 9
    del pool
    gc.collect()
    assert (view == 9).all()


def test_free_is_ordered_behind_its_streams_work(host, driver):
    with gpumem.DriverPool("host") as pool:
        first, second = gpumem.Stream("host"), gpumem.Stream("host")
        busy = pool.allocate(MIB, first)
        address = busy.ptr
        with driver.block(first):
            driver.fill(busy, 1, first)
            busy.close()
            other = pool.allocate(MIB, second)
            assert other.ptr != address, "handed over while its stream was blocked"
        other.close()


def test_closing_on_another_stream_is_accepted_and_idempotent(pool):
    buffer = pool.allocate(4096, gpumem.Stream("host"))
    other = gpumem.Stream("host")
    buffer.close(other)
    buffer.close()
    assert buffer.stream == other
    assert pool.stats().num_frees == 1


def test_close_is_refused_while_a_view_lives():
    pool = gpumem.DriverPool("host")
    buffer = pool.allocate(4096)
    view = memoryview(buffer)
    buffer.close()
    with pytest.raises(gpumem.errors.InUseError, match=r"in use: 4\.0 KiB in 1 block; close"):
        pool.close()
    view.release()
    pool.close()
    pool.close()
    with pytest.raises(gpumem.errors.ClosedError):
        pool.allocate(1)


def test_shrink_releases_all_but_the_bytes_to_keep():
    config = {"release_threshold": 1 << 40, "bytes_to_keep_on_shrink": 0}
    with gpumem.DriverPool("host", config) as pool:
        pool.allocate(8 * MIB).close()
        before = pool.stats().reserved
        assert before >= 8 * MIB
        assert pool.shrink().released_bytes == before - pool.stats().reserved
        assert pool.stats().reserved == 0
        assert pool.stats().num_shrinkages == 1


def test_pool_from_a_handle_is_shared_and_not_destroyed():
    owner = gpumem.DriverPool("host")
    guest = gpumem.DriverPool("host", handle=owner.handle)
    guest.allocate(MIB).close()
    guest.close()
    owner.allocate(MIB).close()
    owner.close()


def test_handle_and_settings_together_are_refused():
    with gpumem.DriverPool("host") as owner, pytest.raises(gpumem.ConfigError):
        gpumem.DriverPool("host", {"max_size": 1}, handle=owner.handle)


def test_out_of_memory_error_has_the_numbers():
    with gpumem.DriverPool("host", {"max_size": 32 * MIB}) as pool:
        with pytest.raises(gpumem.OutOfMemoryError) as caught:
            pool.allocate(64 * MIB)
        error = caught.value
        assert (error.requested_nbytes, error.allocated_nbytes, error.limit) == (
            64 * MIB,
            64 * MIB,
            32 * MIB,
        )
        assert (error.in_use, error.device, error.stream) == (0, "host:0", 0)
        assert "the block alone is larger than max_size" in str(error)
        assert pool.stats().num_allocs == 0
        pool.allocate(MIB).close()


def test_empty_block_has_pointer_zero(pool):
    buffer = pool.allocate(0)
    assert (buffer.ptr, buffer.nbytes) == (0, 0)
    buffer.close()


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_pool_serves_device_memory_only(memory):
    with pytest.raises(gpumem.ConfigError, match="own memory"):
        gpumem.DriverPool(memory)


def test_pool_config_reads_onnx_runtimes_keys_and_round_trips():
    config = gpumem.PoolConfig.from_mapping(
        {
            "ep.cuda.arena.cuda_mempool_release_threshold": "4096",
            "arena.cuda_mempool_bytes_to_keep_on_shrink": 8,
        }
    )
    assert (config.release_threshold, config.bytes_to_keep_on_shrink) == (4096, 8)
    assert gpumem.PoolConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    "mapping", [{"release_threshold": -1}, {"max_mem": 5}, {"reuse_allow_opportunistic": "maybe"}]
)
def test_unsupported_options_are_refused(mapping):
    with pytest.raises(gpumem.ConfigError, match=next(iter(mapping))):
        gpumem.PoolConfig.from_mapping(mapping)


# ---- streams -------------------------------------------------------------------------------------


@pytest.fixture
def misuse(host):
    """The host device looks for memory used after its free, and for accesses without order."""
    before = {kind: host.misuse_count(kind) for kind in host.MISUSE}
    host.find_misuse(True)
    yield lambda: {kind: host.misuse_count(kind) - before[kind] for kind in before}
    host.find_misuse(False)


def test_pool_has_a_default_stream(stream):
    with gpumem.DriverPool("host", default_stream=stream) as pool:
        with pool.allocate(100) as buffer, pool.allocate_persistent(100) as weights:
            assert buffer.stream == stream
            assert weights.stream == stream
        with pool.allocate(100, 1) as buffer:
            assert buffer.stream.ptr in (0, 1)


def test_stream_lives_as_long_as_blocks_are_freed_on_it(host):
    collect()
    streams = host.live()["streams"]
    with gpumem.DriverPool("host") as pool:
        buffer = pool.allocate(MIB, gpumem.Stream("host"))
        gc.collect()
        assert host.live()["streams"] == streams + 1
        buffer.close()
        assert pool.stats().num_frees == 1
    assert host.live()["streams"] == streams


def test_stream_lives_for_a_view_that_outlives_pool_and_buffer(host):
    collect()
    before = pools_and_streams(host)
    pool = gpumem.DriverPool("host")
    view = np.from_dlpack(pool.allocate(4096, gpumem.Stream("host")))
    del pool
    gc.collect()
    assert pools_and_streams(host) == (before[0] + 1, before[1] + 1, before[2])
    frees = host.call_count("cuMemFreeAsync")
    del view
    collect()
    assert host.call_count("cuMemFreeAsync") == frees + 1
    assert pools_and_streams(host) == before


def test_reset_stream_may_be_destroyed_before_its_blocks_are_freed(host, misuse, driver):
    with gpumem.DriverPool("host") as pool:
        stream = gpumem.Stream("host")
        buffer = pool.allocate(MIB, stream.ptr)
        driver.fill(buffer, 3, stream)
        stream.synchronize()
        pool.reset_stream(stream.ptr)
        del stream
        gc.collect()
        buffer.close()
        stats = pool.stats()
        assert (stats.in_use, stats.num_frees) == (0, 1)
        assert stats.pool_used == 0
    assert not any(misuse().values())


def test_free_on_a_destroyed_raw_stream_is_retried_by_shrink(host):
    with gpumem.DriverPool("host", {"release_threshold": 1 << 40}) as pool:
        stream = gpumem.Stream("host")
        buffer = pool.allocate(MIB, stream.ptr)
        del stream
        gc.collect()
        buffer.close()
        assert pool.stats().pool_used == MIB, "the driver refused: the stream is gone"
        assert pool.stats().in_use == 0
        pool.shrink()
        assert pool.stats().pool_used == 0
        assert pool.stats().reserved == 0


def test_exhausted_pool_retries_failed_frees_first(host):
    with gpumem.DriverPool("host", {"max_size": 32 * MIB}) as pool:
        buffer = pool.allocate(32 * MIB)
        host.fail("cuMemFreeAsync", 1, UNKNOWN)
        buffer.close()
        pool.allocate(32 * MIB).close()
        assert pool.stats().pool_used == 0


def test_handle_reused_after_a_reset_is_a_new_stream(host):
    with gpumem.DriverPool("host") as pool:
        stream = gpumem.Stream("host")
        first = pool.allocate(100, stream)
        pool.reset_stream(stream)
        second = pool.allocate(100, stream)
        assert first.stream.ptr == 0
        assert second.stream is stream
        first.close()
        second.close()
        pool.reset_stream(None)


def test_default_stream_is_per_thread(host, misuse, driver):
    """A block of one thread's own stream that another frees is ordered behind its work."""
    with gpumem.DriverPool("host", default_stream=2) as pool:
        made = []

        class Own:
            ptr = 2

        freed, filled = threading.Event(), threading.Barrier(5)

        def work():
            buffer = pool.allocate(MIB)
            driver.fill(buffer, 1, Own)
            made.append(buffer)
            filled.wait()
            freed.wait()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        filled.wait()
        for buffer in made:
            buffer.close()
        freed.set()
        for thread in threads:
            thread.join()
        assert pool.stats().in_use == 0
    assert not any(misuse().values())


# ---- sizes and alignment -------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 256, 512, 4096, 1 << 21])
def test_block_is_aligned_as_asked(pool, alignment):
    with pool.allocate(1000, alignment=alignment) as buffer:
        assert buffer.ptr % alignment == 0
        assert buffer.ptr % 256 == 0
        np.frombuffer(buffer, np.uint8)[:] = 1
        assert (buffer.nbytes, buffer.allocated_nbytes) == (1000, 1000 + max(alignment, 256) - 256)
    assert pool.stats().in_use == 0


@pytest.mark.parametrize("alignment", [0, -256, 3, 1 << 22, 256.0, "256", True])
def test_invalid_alignment_is_refused(pool, alignment):
    with pytest.raises(ValueError, match="is not a power of two from 1 to 2097152"):
        pool.allocate(1000, alignment=alignment)
    assert pool.stats().num_allocs == 0


@pytest.mark.parametrize("nbytes", [1 << 48, (1 << 63) - 1, 10**30])
def test_size_beyond_the_address_space_is_out_of_memory_without_a_driver_call(pool, host, nbytes):
    calls = host.call_count()
    with pytest.raises(gpumem.OutOfMemoryError, match="exceeds the address space"):
        pool.allocate(nbytes)
    assert host.call_count() == calls


def test_persistent_blocks_count_in_stats(pool):
    with pool.allocate_persistent(1000), pool.allocate_persistent(24):
        assert pool.stats().num_reserves == 2
    assert pool.stats().num_frees == 2
    assert not pool.is_arena


# ---- statistics ----------------------------------------------------------------------------------


def test_stats_after_a_known_history_also_under_onnx_runtimes_keys():
    with gpumem.DriverPool("host", {"release_threshold": 1 << 40}) as pool:
        held = [pool.allocate(1000), pool.allocate(3 * MIB), pool.allocate_persistent(500)]
        held.pop(1).close()
        stats = pool.stats()
        assert isinstance(stats, gpumem.PoolStats)
        assert (stats.in_use, stats.requested_in_use) == (1500, 1500)
        assert stats.max_in_use == 1500 + 3 * MIB
        assert (stats.num_allocs, stats.num_frees, stats.num_reserves) == (3, 1, 1)
        assert stats.max_alloc_size == 3 * MIB
        assert stats.driver_calls == 4
        assert stats.reserved >= 1500
        assert stats.as_ort() == {
            "Limit": "0",
            "InUse": "1500",
            "RequestedInUse": "1500",
            "TotalAllocated": str(stats.reserved),
            "MaxInUse": str(stats.max_in_use),
            "NumAllocs": "3",
            "NumReserves": "0",
            "NumArenaExtensions": "0",
            "NumArenaShrinkages": "0",
            "MaxAllocSize": str(3 * MIB),
        }
        pool.shrink()
        pool.shrink()
        assert pool.stats().as_ort()["NumArenaShrinkages"] == "2", "calls, not regions"
        held.clear()


def test_stats_limit_is_max_size():
    with gpumem.DriverPool("host", {"max_size": 64 * MIB}) as pool:
        assert pool.stats().limit == 64 * MIB
        assert pool.stats().as_ort()["Limit"] == str(64 * MIB)


def test_stats_leave_out_other_users_of_a_shared_pool(pool):
    guest = gpumem.DriverPool("host", handle=pool.handle)
    with pool.allocate(MIB), guest.allocate(2 * MIB):
        assert (pool.stats().in_use, guest.stats().in_use) == (MIB, 2 * MIB)
        assert pool.stats().pool_used == guest.stats().pool_used == 3 * MIB
    guest.close()


def test_stats_are_exact_under_threads(pool):
    def work(number):
        stream = gpumem.Stream("host")
        for i in range(200):
            with pool.allocate(1000 * number + i, stream), pool.allocate(7):
                pass

    in_threads(work, range(1, 5))
    stats = pool.stats()
    assert (stats.num_allocs, stats.num_frees) == (1600, 1600)
    assert (stats.in_use, stats.requested_in_use) == (0, 0)
    assert stats.max_alloc_size == 4199
    assert 4199 + 7 <= stats.max_in_use <= 4 * (4199 + 7)


def test_concurrent_close_and_allocate_give_a_block_or_an_error():
    for _ in range(20):
        pool = gpumem.DriverPool("host")
        refused = []

        def allocate(pool=pool, refused=refused):
            try:
                while True:
                    pool.allocate(100).close()
            except gpumem.errors.ClosedError:
                refused.append("closed")

        threads = [threading.Thread(target=allocate) for _ in range(3)]
        for thread in threads:
            thread.start()
        while not pool.closed:
            try:
                pool.close()
            except gpumem.errors.InUseError:
                continue
        for thread in threads:
            thread.join()
        assert len(refused) == 3


# ---- a device's own pools ------------------------------------------------------------------------


@pytest.mark.parametrize("adopt", [gpumem.DriverPool.default, gpumem.DriverPool.current])
def test_default_and_current_pool_are_used_and_not_destroyed(host, adopt):
    pool = adopt("host")
    handle = pool.handle
    with pool.allocate(MIB) as buffer:
        np.frombuffer(buffer, np.uint8)[:] = 1
    settings = pool.config
    destroyed = host.call_count("cuMemPoolDestroy")
    pool.close()
    assert host.call_count("cuMemPoolDestroy") == destroyed
    again = adopt("host")
    assert (again.handle, again.config) == (handle, settings)
    again.close()


def test_config_of_an_existing_pool_is_queried(pool):
    config = {"release_threshold": 4096, "reuse_allow_opportunistic": False}
    with gpumem.DriverPool("host", config) as owner:
        guest = gpumem.DriverPool("host", handle=owner.handle)
        assert guest.config == owner.config
        guest.close()


@pytest.mark.parametrize(
    ("handle", "error"),
    [(0, ValueError), (-1, ValueError), (1 << 64, ValueError), (True, TypeError),
     (1.5, TypeError), ("5", TypeError), (12345, gpumem.errors.DriverError)],
)  # fmt: skip
def test_invalid_pool_handle_is_refused(host, handle, error):
    pools = host.live()["pools"]
    with pytest.raises(error):
        gpumem.DriverPool("host", handle=handle)
    assert host.live()["pools"] == pools


# ---- failure -------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["cuMemPoolCreate", "cuMemPoolSetAttribute"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_failed_pool_creation_leaves_nothing(host, function, call):
    pools = host.live()["pools"]
    host.fail(function, call, UNKNOWN)
    if call > (1 if function == "cuMemPoolCreate" else 4):
        gpumem.DriverPool("host", {"release_threshold": 1}).close()
    else:
        with pytest.raises(gpumem.errors.DriverError, match=function):
            gpumem.DriverPool("host", {"release_threshold": 1})
    host.clear_faults()
    assert host.live()["pools"] == pools


def scenario(pool, stream):
    """A life with every call in it; what fails raises, and the rest goes on."""
    refused = []

    def attempt(call):
        try:
            return call()
        except (gpumem.OutOfMemoryError, gpumem.errors.DriverError) as error:
            refused.append(error)

    held = [attempt(lambda: pool.allocate(MIB)), attempt(lambda: pool.allocate(3 * MIB, stream))]
    attempt(pool.shrink)
    held.append(attempt(lambda: pool.allocate_persistent(MIB)))
    held.append(attempt(lambda: pool.allocate(100, alignment=4096)))
    attempt(pool.stats)
    view = np.from_dlpack(held[0]) if held[0] else None
    for buffer in held:
        if buffer:
            buffer.close()
    del view
    attempt(pool.shrink)
    return refused


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, UNKNOWN])
def test_pool_survives_a_failure_of_any_driver_call(host, error, stream):
    collect()
    before = pools_and_streams(host)
    with gpumem.DriverPool("host") as pool:
        calls = host.call_count()
        assert not scenario(pool, stream)
        calls = host.call_count() - calls
    assert calls > 30
    for number in range(1, calls + 1):
        pool = gpumem.DriverPool("host")
        host.fail(None, number, error)
        refused = in_a_thread(lambda pool=pool: scenario(pool, stream))
        host.clear_faults()
        assert len(refused) <= 1, f"call {number}: {refused}"
        pool.shrink()
        stats = pool.stats()
        assert (stats.in_use, stats.requested_in_use) == (0, 0), f"call {number}"
        assert stats.num_allocs == stats.num_frees, f"call {number}"
        assert stats.pool_used == 0, f"call {number}"
        pool.close()
        collect()
        assert pools_and_streams(host) == before, f"call {number}"


def test_driver_errors_name_their_call(pool, host):
    host.fail("cuMemAllocFromPoolAsync", 1, UNKNOWN)
    with pytest.raises(gpumem.errors.DriverError, match="cuMemAllocFromPoolAsync") as caught:
        pool.allocate(100)
    assert (caught.value.call, caught.value.code) == ("cuMemAllocFromPoolAsync", UNKNOWN)
    host.fail("cuMemPoolTrimTo", 1, UNKNOWN)
    with pytest.raises(gpumem.errors.DriverError, match="cuMemPoolTrimTo"):
        pool.shrink()
    assert pool.stats().num_shrinkages == 0


def test_pool_is_initialised_once_and_before_use(pool):
    with pytest.raises(TypeError, match="__init__ called twice"):
        pool.__init__("host")
    raw = gpumem.DriverPool.__new__(gpumem.DriverPool)
    for call in (lambda: raw.allocate(1), raw.stats, raw.shrink, lambda: raw.reset_stream(None)):
        with pytest.raises(gpumem.errors.ClosedError):
            call()
    raw.close()


def test_closed_pool_refuses_every_call(pool):
    other = gpumem.DriverPool("host")
    other.close()
    for call in (lambda: other.allocate(0), lambda: other.allocate(1), other.stats, other.shrink,
                 lambda: other.reset_stream(1), lambda: other.allocate_persistent(1),
                 lambda: other.handle, other.export_handle):  # fmt: skip
        with pytest.raises(gpumem.errors.ClosedError):
            call()
    assert other.closed


# ---- streams that were recorded ------------------------------------------------------------------


def test_free_waits_on_the_device_for_recorded_streams(host, misuse):
    driver, side = HostDriver(), gpumem.Stream("host")
    with gpumem.DriverPool("host") as pool:
        buffer = pool.allocate(MIB)
        buffer.record_stream(side)
        view = memoryview(pool.allocate(MIB))
        gpumem.Device("host").synchronize()
        with driver.block(side):
            driver.fill(buffer, 1, side)
            buffer.close()
        view.release()
        side.synchronize()
        assert pool.stats().pool_used == 0
    assert not any(misuse().values())


@pytest.mark.parametrize("share", [False, True])
def test_recorded_streams_work_comes_before_the_next_owners(host, share):
    driver, own, side = HostDriver(), gpumem.Stream("host"), gpumem.Stream("host")
    with gpumem.DriverPool("host") as pool, pool.allocate(MIB) as read:
        buffer = pool.allocate(MIB, own)
        address = buffer.ptr
        view = memoryview(buffer) if share else None
        driver.fill(buffer, 1, own)
        own.synchronize()
        buffer.record_stream(side)
        with driver.block(side):
            driver.call("cuMemcpyDtoDAsync", read.ptr, buffer.ptr, MIB, side.ptr)
            buffer.close()
            del view
            again = pool.allocate(MIB, own)
            assert again.ptr == address, "in the order of its stream"
            driver.fill(again, 2, own)
            assert not own.query()
        side.synchronize()
        assert set(memoryview(read)) == {1}
        again.close()


def test_failed_wait_for_a_recorded_stream_loses_no_ordering(host, misuse):
    driver, side = HostDriver(), gpumem.Stream("host")
    with gpumem.DriverPool("host") as pool:
        for function in ("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"):
            buffer = pool.allocate(MIB)
            gpumem.Device("host").synchronize()
            buffer.record_stream(side)
            driver.fill(buffer, 1, side)
            host.fail(function, 1, UNKNOWN)
            buffer.close()
            assert pool.stats().in_use == 0
            pool.shrink()
            assert pool.stats().pool_used == 0, function
    assert not any(misuse().values())


@pytest.mark.parametrize("closed", [False, True])
def test_pool_that_the_driver_refuses_to_destroy_is_destroyed_at_its_end(host, closed):
    collect()
    pools = host.live()["pools"]
    pool = gpumem.DriverPool("host")
    host.fail("cuMemPoolDestroy", 1, UNKNOWN)
    try:
        if closed:
            pool.close()
            assert host.live()["pools"] == pools + 1
        del pool
        collect()
    finally:
        host.clear_faults()
    assert host.live()["pools"] == pools

"""DriverPool: the driver's stream-ordered pool behind the same Buffer."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers.driver import HostDriver

import gpumem

MIB = 1 << 20


@pytest.fixture
def pool():
    with gpumem.DriverPool("host") as pool:
        yield pool


def test_a_block_holds_what_is_written_and_goes_back_on_close(pool):
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


def test_a_view_keeps_the_block_after_buffer_and_pool_are_gone():
    pool = gpumem.DriverPool("host")
    view = np.from_dlpack(pool.allocate(4096))
    view[:] = 9
    del pool
    gc.collect()
    assert (view == 9).all()


def test_a_free_is_ordered_behind_its_streams_work(host):
    driver = HostDriver()
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
    with pytest.raises(gpumem.InUseError, match="4096 bytes in 1 blocks"):
        pool.close()
    view.release()
    pool.close()
    pool.close()
    with pytest.raises(gpumem.ClosedError):
        pool.allocate(1)


def test_shrink_gives_back_what_is_beyond_the_bytes_to_keep():
    config = {"release_threshold": 1 << 40, "bytes_to_keep_on_shrink": 0}
    with gpumem.DriverPool("host", config) as pool:
        pool.allocate(8 * MIB).close()
        before = pool.stats().reserved
        assert before >= 8 * MIB
        assert pool.shrink().released_bytes == before - pool.stats().reserved
        assert pool.stats().reserved == 0
        assert pool.stats().num_shrinkages == 1


def test_a_pool_given_by_handle_is_shared_and_not_destroyed():
    owner = gpumem.DriverPool("host")
    guest = gpumem.DriverPool("host", handle=owner.handle)
    guest.allocate(MIB).close()
    guest.close()
    owner.allocate(MIB).close()
    owner.close()


def test_a_handle_and_settings_together_are_refused():
    with gpumem.DriverPool("host") as owner, pytest.raises(gpumem.ConfigError):
        gpumem.DriverPool("host", {"max_size": 1}, handle=owner.handle)


def test_exhaustion_names_the_numbers():
    with gpumem.DriverPool("host", {"max_size": 32 * MIB}) as pool:
        with pytest.raises(gpumem.OutOfMemoryError) as caught:
            pool.allocate(64 * MIB)
        assert caught.value.asked == 64 * MIB
        assert pool.stats().num_allocs == 0
        pool.allocate(MIB).close()


def test_an_empty_block_has_pointer_zero(pool):
    buffer = pool.allocate(0)
    assert (buffer.ptr, buffer.nbytes) == (0, 0)
    buffer.close()


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_only_a_devices_own_memory_has_a_pool(memory):
    with pytest.raises(gpumem.ConfigError, match="own memory"):
        gpumem.DriverPool(memory)


def test_settings_read_onnx_runtimes_keys_and_go_round_through_text():
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
def test_settings_that_a_pool_does_not_take_are_refused(mapping):
    with pytest.raises(gpumem.ConfigError, match=next(iter(mapping))):
        gpumem.PoolConfig.from_mapping(mapping)

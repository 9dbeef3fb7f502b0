"""PyTorch's pinned memory over an arena, with PyTorch's c10 libraries, on the host device.

It needs a PyTorch that is unpacked: GPUMEM_TORCH names its folder ``torch``.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import torch_library
from helpers.torch_library import Refused

from gpumem import Arena
from gpumem._testing import torch_hooks

pytestmark = pytest.mark.skipif(
    torch_library.unpacked() is None,
    reason=f"{torch_library.VARIABLE} names no folder of an unpacked PyTorch",
)

MIB = 1 << 20
BROKEN = (1 << 64) - 2  # a stream on which the stand-in records no event


@pytest.fixture
def arena(torch_driver):
    """An arena that serves pinned memory; a fresh one takes over after the test."""
    arena = Arena("host/pinned", {"extend_strategy": "same_as_requested"})
    torch_hooks.serve(torch_hooks.PINNED, arena)
    torch_driver.pinned_reset()
    torch_driver.unfinished.value = 0
    yield arena
    torch_driver.unfinished.value = 0
    torch_driver.pinned_empty()
    torch_hooks.serve(torch_hooks.PINNED, Arena("host/pinned"))
    arena.check_invariants()


@pytest.fixture
def stream(torch_stream):
    return torch_stream


def test_block_has_its_exact_size_and_is_freed_to_the_arena(torch_driver, arena):
    address, context = torch_driver.pinned_alloc(33 * MIB)
    ctypes.memset(address, 7, 33 * MIB)
    assert arena.stats().requested_in_use == 33 * MIB
    assert arena.stats().reserved == 33 * MIB
    torch_driver.pinned_free(context)
    assert arena.stats().in_use == 0
    assert arena.stats().reserved == 33 * MIB


def test_nothing_is_allocated_for_no_bytes(torch_driver, arena):
    assert torch_driver.pinned_alloc(0) == (0, None)
    torch_driver.pinned_free(None)
    assert arena.stats().num_allocs == 0


def test_freed_block_is_reused_once_the_streams_that_used_it_have_passed(
    torch_driver, arena, stream
):
    address, context = torch_driver.pinned_alloc(4096)
    assert torch_driver.pinned_record(address, context, stream.ptr) == 1
    torch_driver.unfinished.value = 1
    torch_driver.pinned_free(context)
    other, other_context = torch_driver.pinned_alloc(4096)
    assert other != address
    assert arena.stats().in_use == 2 * 4096
    torch_driver.unfinished.value = 0
    again, again_context = torch_driver.pinned_alloc(4096)
    assert again == address
    for each in (other_context, again_context):
        torch_driver.pinned_free(each)
    assert arena.stats().in_use == 0


def test_use_is_recorded_for_an_address_inside_a_block_whatever_the_context(
    torch_driver, arena, stream
):
    address, context = torch_driver.pinned_alloc(4096)
    assert torch_driver.pinned_record(address + 4095, 0, stream.ptr) == 1
    assert torch_driver.pinned_record(address + 4096, context, stream.ptr) == 0
    assert torch_driver.pinned_record(address - 1, context, stream.ptr) == 0
    torch_driver.unfinished.value = 1
    torch_driver.pinned_free(context)
    assert arena.stats().in_use == 4096
    assert torch_driver.pinned_record(address, context, stream.ptr) == 0


def test_allocation_waits_for_freed_blocks_before_memory_is_out(torch_driver, stream):
    arena = Arena("host/pinned", {"max_mem": MIB, "oom_wait_ms": 0})
    torch_hooks.serve(torch_hooks.PINNED, arena)
    address, context = torch_driver.pinned_alloc(MIB)
    torch_driver.pinned_record(address, context, stream.ptr)
    torch_driver.unfinished.value = 1
    torch_driver.pinned_free(context)
    again, again_context = torch_driver.pinned_alloc(MIB)
    assert again == address
    assert torch_driver.unfinished.value == 0
    with pytest.raises(Refused, match="limit") as refusal:
        torch_driver.pinned_alloc(4096)
    assert refusal.value.out_of_memory
    assert "CUDA out of memory" not in str(refusal.value)
    torch_driver.pinned_free(again_context)
    torch_hooks.serve(torch_hooks.PINNED, Arena("host/pinned"))


def test_block_stays_in_use_if_its_stream_takes_no_event(torch_driver, arena, capfd):
    address, context = torch_driver.pinned_alloc(4096)
    torch_driver.pinned_record(address, context, BROKEN)
    torch_driver.pinned_free(context)
    assert "4096 bytes of pinned memory stay in use" in capfd.readouterr().err
    assert arena.stats().in_use == 4096


def test_emptied_cache_gives_idle_memory_back(torch_driver, arena):
    _, kept = torch_driver.pinned_alloc(MIB)
    torch_driver.pinned_free(torch_driver.pinned_alloc(8 * MIB)[1])
    torch_driver.pinned_empty()
    assert arena.stats().reserved == MIB
    torch_driver.pinned_free(kept)


def test_devices_cache_and_snapshot_leave_pinned_memory_alone(torch_driver, arena):
    device = Arena("host")
    torch_hooks.serve(0, device)
    _, context = torch_driver.pinned_alloc(8 * MIB)
    torch_driver.pinned_free(context)
    torch_driver.free(torch_driver.alloc(MIB))
    torch_driver.empty_cache()
    assert arena.stats().reserved == 8 * MIB
    assert torch_driver.stats()["reserved_bytes"][0][0] == device.stats().reserved == 0
    assert torch_driver.snapshot(0, 0)["segments"] == []


def test_statistics_count_blocks_and_regions(torch_driver, arena):
    contexts = [torch_driver.pinned_alloc(3 * MIB)[1] for _ in range(3)]
    torch_driver.pinned_free(contexts.pop())
    stats = torch_driver.pinned_stats()
    assert stats["active_requests"][0] == [2, 3, 3, 1]
    assert stats["active_bytes"][0] == [6 * MIB, 9 * MIB, 9 * MIB, 3 * MIB]
    assert stats["allocations"][0][:2] == [3, 3]
    assert stats["allocated_bytes"][0][:2] == [9 * MIB, 9 * MIB]
    assert (stats["num_host_alloc"], stats["num_host_free"]) == (3, 0)
    torch_driver.pinned_empty()
    torch_driver.pinned_reset()
    stats = torch_driver.pinned_stats()
    assert stats["active_requests"][0] == [2, 2, 0, 0]
    assert stats["allocated_bytes"][0][:2] == [6 * MIB, 6 * MIB]
    assert (stats["num_host_alloc"], stats["num_host_free"]) == (0, 0)
    for context in contexts:
        torch_driver.pinned_free(context)


def test_block_of_a_graph_stays_until_its_pool_has_ended_and_the_device_has_passed(
    torch_driver, arena, stream, numbers
):
    number = next(numbers)
    with torch_driver.pinning_to(number, stream):
        _, context = torch_driver.pinned_alloc(4096, stream.ptr)
        _, late_context = torch_driver.pinned_alloc(4096, stream.ptr)
        ordinary, ordinary_context = torch_driver.pinned_alloc(4096)
    torch_driver.pinned_free(context)
    torch_driver.pinned_free(ordinary_context)
    assert torch_driver.pinned_alloc(4096)[0] == ordinary
    torch_driver.pinned_empty()
    assert arena.stats().in_use == 3 * 4096
    torch_driver.pinned_release(number)
    torch_driver.pinned_free(late_context)
    assert arena.stats().in_use == 3 * 4096
    before = torch_driver.synchronized.value
    torch_driver.pinned_empty()
    assert torch_driver.synchronized.value == before + 1
    assert arena.stats().in_use == 4096
    torch_driver.pinned_empty()
    assert torch_driver.synchronized.value == before + 1


def test_block_that_a_capture_uses_is_its_graphs_once_it_is_freed(
    torch_driver, arena, stream, numbers
):
    number = next(numbers)
    address, context = torch_driver.pinned_alloc(4096)
    with torch_driver.pinning_to(number, stream):
        torch_driver.pinned_record(address, context, stream.ptr)
        torch_driver.pinned_free(context)
    other, other_context = torch_driver.pinned_alloc(4096)
    assert other != address
    torch_driver.pinned_empty()
    assert arena.stats().in_use == 2 * 4096
    torch_driver.pinned_release(number)
    torch_driver.pinned_empty()
    assert arena.stats().in_use == 4096
    torch_driver.pinned_free(other_context)


def test_pool_lives_as_long_as_one_of_its_graphs(torch_driver, arena, stream, numbers):
    number = next(numbers)
    for _ in range(2):
        with torch_driver.pinning_to(number, stream):
            torch_driver.pinned_free(torch_driver.pinned_alloc(4096, stream.ptr)[1])
    torch_driver.pinned_release(number)
    torch_driver.pinned_empty()
    assert arena.stats().in_use == 4096
    torch_driver.pinned_release(number)
    torch_driver.pinned_empty()
    assert arena.stats().in_use == 0


def test_pool_uses_again_what_no_copy_of_its_graphs_has_used(torch_driver, arena, stream, numbers):
    number = next(numbers)
    for _ in range(2):  # graphs that share it
        with torch_driver.pinning_to(number, stream):
            address, context = torch_driver.pinned_alloc(4096, stream.ptr)
            torch_driver.pinned_free(context)
            again, context = torch_driver.pinned_alloc(2049, stream.ptr)
            assert again == address
            torch_driver.pinned_free(context)
            other, other_context = torch_driver.pinned_alloc(2048, stream.ptr)
            assert other != address  # half of it would stay unused
            torch_driver.pinned_free(other_context)
    assert arena.stats().in_use == 4096 + 2048
    with torch_driver.pinning_to(number, stream):
        address, context = torch_driver.pinned_alloc(4096, stream.ptr)
        torch_driver.pinned_record(address, context, stream.ptr)
        torch_driver.pinned_free(context)
        assert torch_driver.pinned_alloc(4096, stream.ptr)[0] != address
    for _ in range(3):
        torch_driver.pinned_release(number)


def test_pool_begins_once_and_ends_only_where_it_has_begun(torch_driver, arena, stream, numbers):
    number = next(numbers)
    torch_driver.pinned_begin(number, stream.ptr)
    with pytest.raises(Refused, match="already"):
        torch_driver.pinned_begin(number, stream.ptr)
    torch_driver.pinned_end(number)
    with pytest.raises(Refused, match="no pinned memory is allocated"):
        torch_driver.pinned_end(number)
    torch_driver.pinned_release(number)
    torch_driver.pinned_release(number)


def test_threads_allocate_and_free_pinned_memory_side_by_side(torch_driver, arena, stream):
    def work(number):
        for size in range(256, 256 * 200, 256 * (number + 1)):
            address, context = torch_driver.pinned_alloc(size)
            ctypes.memset(address, number, size)
            if size % 3 == 0:
                torch_driver.pinned_record(address, context, stream.ptr)
            assert ctypes.string_at(address, size) == bytes([number]) * size
            torch_driver.pinned_free(context)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    torch_driver.pinned_empty()
    assert arena.stats().in_use == 0

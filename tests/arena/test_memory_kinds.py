"""The same arena over each kind of memory, and with the arena switched off."""

import numpy as np
import pytest

import gpumem

KIB, MIB = 1 << 10, 1 << 20
KINDS = {
    "host": ("cuMemAlloc", "cuMemFreeAsync"),
    "host/host_accessible": ("cuMemHostAlloc", "cuMemFreeHost"),
    "host/managed": ("cuMemAllocManaged", "cuMemFree"),
}


@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("enable", [True, False])
def test_blocks_of_every_kind_are_written_and_read(make_arena, memory, enable):
    arena = make_arena({"enable": enable}, memory)
    buffers = [arena.allocate(10 * KIB) for _ in range(20)]
    for number, buffer in enumerate(buffers):
        np.frombuffer(buffer, np.uint8)[:] = number
    for number, buffer in enumerate(buffers):
        assert (np.frombuffer(buffer, np.uint8) == number).all()
        assert buffer.memory == gpumem.MemoryInfo.parse(memory)
    buffers.clear()


@pytest.mark.parametrize("memory", KINDS)
def test_each_memory_kind_uses_its_own_driver_functions(make_arena, host, memory):
    take, give = KINDS[memory]
    before = host.call_count(take), host.call_count(give)
    arena = make_arena({"backing": "regions"}, memory)
    arena.allocate(1000).close()
    arena.shrink()
    assert (host.call_count(take), host.call_count(give)) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("memory", KINDS)
def test_every_memory_kind_raises_out_of_memory(make_arena, memory):
    arena = make_arena({"max_mem": MIB}, memory)
    with pytest.raises(gpumem.OutOfMemoryError, match=str(arena.memory)):
        arena.allocate(2 * MIB)


def test_host_buffer_has_no_cuda_array_interface(arena):
    buffer = arena.allocate(10)
    assert not hasattr(buffer, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = buffer.nonsense


# ---- enable=False --------------------------------------------------------------------------------


def test_disabled_arena_makes_one_driver_allocation_per_block(make_arena, host):
    arena = make_arena({"enable": False})
    calls = host.call_count("cuMemAlloc"), host.call_count("cuMemFreeAsync")
    buffers = [arena.allocate(1000) for _ in range(5)]
    assert host.call_count("cuMemAlloc") == calls[0] + 5
    assert arena.stats().num_regions == 5
    assert arena.stats().num_extensions == 0
    buffers.clear()
    assert host.call_count("cuMemFreeAsync") == calls[1] + 5
    assert arena.stats().reserved == 0
    arena.check_invariants()


def test_disabled_arena_keeps_its_limit(make_arena):
    arena = make_arena({"enable": False, "max_mem": 10 * KIB})
    held = arena.allocate(9 * KIB)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(2 * KIB)
    held.close()
    assert arena.allocate(10 * KIB).nbytes == 10 * KIB

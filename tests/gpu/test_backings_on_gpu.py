"""Every backing on a real device: pinned, managed, of a NUMA node, from a source."""

import ctypes
import os

import numpy as np
import pytest

import gpumem

MIB = 1 << 20
EXACT = {"extend_strategy": "same_as_requested"}
PINNED, MANAGED = "cuda:0/host_accessible", "cuda:0/managed"


@pytest.fixture
def fill(driver):
    """Let the device write every byte, and wait."""

    def fill(buffer, value):
        driver.call(driver.cuMemsetD8Async, buffer.ptr, value, buffer.nbytes, 0)
        driver.call(driver.cuStreamSynchronize, 0)

    return fill


@pytest.mark.parametrize("nbytes", [MIB, 2 * MIB, 33 * MIB + 4096])
def test_device_and_cpu_see_the_same_pinned_bytes(nbytes, fill):
    with gpumem.Arena(PINNED, EXACT) as arena, arena.allocate(nbytes) as buffer:
        fill(buffer, 7)
        assert (np.frombuffer(buffer, np.uint8) == 7).all()


def test_pinned_memory_stays_the_parents_after_a_fork(fill):
    with gpumem.Arena(PINNED, EXACT) as arena, arena.allocate(4 * MIB) as buffer:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        np.frombuffer(buffer, np.uint8)[:] = 1
        fill(buffer, 9)
        assert (np.frombuffer(buffer, np.uint8) == 9).all()


def test_managed_memory_takes_every_hint(fill):
    with gpumem.Arena(MANAGED) as arena, arena.allocate(16 * MIB) as buffer:
        fill(buffer, 3)
        buffer.prefetch("host")
        for advice in ("read_mostly", "preferred_location", "accessed_by"):
            buffer.advise(advice)
            buffer.advise(f"unset_{advice}")
            buffer.advise(advice, "host")
            buffer.advise(f"unset_{advice}", "host")
        assert (np.frombuffer(buffer, np.uint8) == 3).all()
        buffer.prefetch()
        fill(buffer, 4)
        assert (np.frombuffer(buffer, np.uint8) == 4).all()
        with pytest.raises(ValueError, match="cuda:99"):
            buffer.prefetch("cuda:99")


def test_numa_memory_is_shared_by_cpu_and_device(fill):
    with gpumem.Arena(PINNED, {"numa_node": 0}) as arena, arena.allocate(5 * MIB) as buffer:
        np.frombuffer(buffer, np.uint8)[:] = 1
        fill(buffer, 2)
        assert (np.frombuffer(buffer, np.uint8) == 2).all()
        assert arena.stats().reserved == 6 * MIB


def test_missing_numa_node_is_refused():
    with pytest.raises(gpumem.ConfigError, match="numa_node = 1000"):
        gpumem.Arena(PINNED, {"numa_node": 1000})


@pytest.mark.parametrize("memory", ["cuda:0", PINNED, MANAGED])
def test_arena_over_the_buffers_of_a_resource(memory, fill):
    below = gpumem.Arena(memory)
    with gpumem.Arena(memory, EXACT, source=below) as arena, arena.allocate(3 * MIB) as buffer:
        fill(buffer, 5)
        assert below.stats().in_use == 3 * MIB
    assert below.stats().in_use == 0
    below.close()


def test_source_must_give_device_memory(fill):
    class Blocks:
        def __init__(self):
            self.arena = gpumem.Arena("cuda:0")
            self.held = {}

        def allocate(self, nbytes):
            buffer = self.arena.allocate(nbytes)
            self.held[buffer.ptr] = buffer
            return buffer.ptr

        def free(self, address, nbytes):
            self.held.pop(address).close()

    source = Blocks()
    with gpumem.Arena("cuda:0", source=source) as arena, arena.allocate(MIB) as buffer:
        fill(buffer, 1)
    assert not source.held
    pages = ctypes.create_string_buffer(2 * MIB)
    source.allocate = lambda nbytes: (ctypes.addressof(pages) + 255) & ~255
    source.free = lambda address, nbytes: None
    arena = gpumem.Arena("cuda:0", source=source)
    with pytest.raises(gpumem.errors.SourceError, match="device memory of cuda:0"):
        arena.allocate(10)

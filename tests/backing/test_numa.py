"""Host memory of a NUMA node, through the driver's virtual memory."""

import ctypes

import numpy as np
import pytest
from helpers.threads import with_a_context_stack_of_its_own

import gpumem

KIB, MIB = 1 << 10, 1 << 20
OUT_OF_MEMORY, UNKNOWN = 2, 999
MEMORIES = ["host", "host/host_accessible"]
PARTS = ("handles", "mappings", "reservations")


def parts(host):
    """What is alive that a node's region is made of."""
    return [host.live()[name] for name in PARTS]


def node_of(address):
    """Return the node that a page is on, as the kernel says; None where it does not."""
    node = ctypes.c_int(-1)
    get_mempolicy, of_address = 239, 1 | 2  # MPOL_F_NODE, MPOL_F_ADDR
    libc = ctypes.CDLL(None)
    code = libc.syscall(
        get_mempolicy, ctypes.byref(node), None, 0, ctypes.c_void_p(address), of_address
    )
    return node.value if code == 0 else None


@pytest.mark.parametrize("memory", MEMORIES)
def test_blocks_lie_on_the_numa_node(make_arena, host, memory):
    before = parts(host)
    arena = make_arena({"numa_node": 0}, memory)
    buffers = [arena.allocate(300 * KIB) for _ in range(20)]
    for number, buffer in enumerate(buffers):
        np.frombuffer(buffer, np.uint8)[:] = number
    for number, buffer in enumerate(buffers):
        assert (np.frombuffer(buffer, np.uint8) == number).all()
        assert node_of(buffer.ptr) in (0, None)
    stats = arena.stats()
    assert stats.reserved % (2 * MIB) == 0
    assert parts(host) == [count + stats.num_regions for count in before]
    del buffers, buffer
    arena.shrink()
    assert parts(host) == before


def test_regions_are_multiples_of_the_granularity_and_blocks_are_not(make_arena):
    arena = make_arena({"numa_node": "0", "extend_strategy": "same_as_requested"})
    with arena.allocate(3 * MIB) as one, arena.allocate_persistent(256) as two:
        assert (one.allocated_nbytes, two.allocated_nbytes) == (3 * MIB, 2 * MIB)
        assert arena.stats().reserved == 6 * MIB
        with arena.allocate(MIB):
            assert arena.stats().reserved == 6 * MIB


def test_limit_below_the_granularity_serves_nothing(make_arena):
    arena = make_arena({"numa_node": 0, "max_mem": 2 * MIB - 1})
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(1)
    arena = make_arena({"numa_node": 0, "max_mem": 3 * MIB})
    held = arena.allocate(2 * MIB)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(1)
    held.close()


def test_refused_region_is_retried_in_whole_granules(make_arena, host):
    arena = make_arena({"numa_node": 0, "initial_chunk_size_bytes": 16 * MIB})
    host.fail("cuMemCreate", 1, OUT_OF_MEMORY, 3)
    buffer = arena.allocate(3 * MIB)
    assert arena.stats().reserved == 10 * MIB  # 16, 14, 12, 10
    buffer.close()


def test_region_is_released_later_after_a_failed_release(make_arena, host):
    before = parts(host)
    arena = make_arena({"numa_node": 0})
    arena.allocate(3 * MIB).close()
    held = parts(host)
    host.fail("cuMemUnmap", 1, UNKNOWN, 0)
    arena.shrink()
    host.clear_faults()
    assert parts(host)[1:] == held[1:]  # a mapping keeps memory whose handle was released
    with arena.allocate(3 * MIB) as buffer:
        np.frombuffer(buffer, np.uint8)[:] = 1
    arena.shrink()
    assert (parts(host), arena.stats().reserved) == (before, 0)


def test_missing_numa_node_raises_the_drivers_error():
    with pytest.raises(gpumem.ConfigError, match=r"numa_node = 1023.* CUDA_ERROR_INVALID_VALUE"):
        gpumem.Arena("host", {"numa_node": 1023})


@pytest.mark.parametrize("value", [-1, 1024, "0x1", 1.5, True, "", "near"])
def test_numa_node_must_be_an_integer(value):
    with pytest.raises(gpumem.ConfigError, match='a NUMA node from 0 to 1023, or "nearest"'):
        gpumem.ArenaConfig(numa_node=value)


@pytest.mark.parametrize("node", [None, 0, 7])
def test_numa_node_round_trips_through_text(node):
    config = gpumem.ArenaConfig(numa_node=node)
    assert gpumem.ArenaConfig.from_mapping(config.to_mapping()) == config
    assert gpumem.ArenaConfig.from_text(config.to_text()) == config


@pytest.mark.parametrize(
    ("memory", "more", "why"),
    [
        ("host/managed", {}, "expected host or host_accessible memory"),
        ("host", {"backing": "virtual"}, "memory of a node is reserved as regions"),
    ],
)
def test_numa_node_on_other_memory_is_refused(memory, more, why):
    with pytest.raises(gpumem.ConfigError, match=why):
        gpumem.Arena(memory, {"numa_node": 0, **more})


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, UNKNOWN])
@with_a_context_stack_of_its_own
def test_failure_of_any_driver_call_leaves_nothing_behind(host, error):
    for call in range(1, 60):
        before = parts(host)
        arena = gpumem.Arena("host/host_accessible", {"numa_node": 0})
        host.fail(None, call, error)
        calls = host.call_count()
        try:
            held = [arena.allocate(MIB), arena.allocate(4 * MIB)]
        except (gpumem.OutOfMemoryError, gpumem.errors.DriverError):
            held = []
        reached = host.call_count() - calls >= call
        host.clear_faults()
        held.clear()
        arena.check_invariants()
        arena.close()
        assert parts(host) == before, f"call {call}"
        if not reached:
            break
    assert call > 10


@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
)
def test_failed_driver_call_is_named(host, call):
    with gpumem.Arena("host", {"numa_node": 0}) as arena:
        host.fail(call, 1, UNKNOWN)
        with pytest.raises(gpumem.errors.DriverError) as caught:
            arena.allocate(1)
        assert caught.value.call == call
        host.clear_faults()
    host.fail(call, 1, UNKNOWN)
    with pytest.raises(gpumem.ConfigError, match=f"{call} failed"):
        gpumem.Arena("host", {"numa_node": 0})


@pytest.mark.parametrize("call", ["cuMemRelease", "cuMemUnmap"])
def test_region_that_the_driver_does_not_take_back_is_whole_and_tried_again(host, call):
    before = parts(host)
    arena = gpumem.Arena("host/host_accessible", {"numa_node": 0})
    arena.allocate(MIB).close()
    host.fail(call, 1, UNKNOWN)
    assert arena.shrink().released_bytes == 0
    with arena.allocate(MIB) as buffer:
        memoryview(buffer)[:] = bytes(MIB)
    assert arena.shrink().released_bytes == 2 * MIB
    arena.close()
    assert parts(host) == before


@pytest.mark.parametrize("call", ["cuMemRelease", "cuMemUnmap"])
def test_trial_of_a_node_leaves_nothing_behind(host, call):
    before = parts(host)
    host.fail(call, 1, UNKNOWN)
    with pytest.raises(gpumem.ConfigError, match=f"{call} failed"):
        gpumem.Arena("host", {"numa_node": 0})
    assert parts(host) == before

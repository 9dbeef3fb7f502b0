"""Blocks that transports can register; registrations; which ways a memory has to others."""

import ctypes
import gc

import numpy as np
import pytest
from helpers.driver import HostDriver

import gpumem
from gpumem.errors import ClosedError, ConfigError, InUseError
from gpumem.interop import Registration, Transports, transports

MIB = 1 << 20


def driver_allocation(address):
    """Return where the driver's allocation that an address lies in begins, and its bytes."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    HostDriver().call(
        "cuMemGetAddressRange", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    return base.value, size.value


CONFIGS = [{"backing": "virtual"}, {"backing": "regions"}, {"enable": False}]


# ---- blocks for a transport ----------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_block_for_ipc_is_one_driver_allocation_of_its_own(config):
    arena = gpumem.Arena("host", config)
    other = arena.allocate(3 * MIB)
    buffer = arena.allocate(MIB + 1000, transport="ipc")
    base, size = driver_allocation(buffer.ptr)
    assert base == buffer.ptr
    assert MIB + 1000 <= size < MIB + 2000
    assert not base <= other.ptr < base + size


@pytest.mark.parametrize("config", CONFIGS)
def test_freed_block_for_ipc_is_released_to_the_driver_and_serves_no_other_request(config):
    arena = gpumem.Arena("host", config)
    buffer = arena.allocate(4 * MIB, transport="ipc")
    held = arena.stats().reserved
    buffer.close()
    again = arena.allocate(4 * MIB, transport="ipc")
    assert arena.stats().reserved == held == again.allocated_nbytes
    again.close()
    arena.shrink()
    assert arena.stats().reserved == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_block_for_ipc_is_freed_by_the_call_that_legacy_handles_follow(host, config):
    """That a driver takes cuMemFreeAsync for exported memory is written nowhere."""
    arena = gpumem.Arena("host", config)
    frees, ordered = host.call_count("cuMemFree"), host.call_count("cuMemFreeAsync")
    arena.allocate(MIB, transport="ipc").close()
    arena.shrink()
    assert host.call_count("cuMemFree") == frees + 1
    assert host.call_count("cuMemFreeAsync") == ordered
    arena.close()


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_registered_block_is_freed_by_the_call_that_legacy_handles_follow(host, config):
    arena = gpumem.Arena("host", config)
    frees, ordered = host.call_count("cuMemFree"), host.call_count("cuMemFreeAsync")
    other, buffer = arena.allocate(3 * MIB), arena.allocate(2 * MIB)
    for _ in range(2):
        buffer.register().release()
    buffer.close()
    arena.shrink()
    assert host.call_count("cuMemFree") == frees + 1
    assert host.call_count("cuMemFreeAsync") == ordered
    other.close()
    arena.close()
    assert host.call_count("cuMemFree") == frees + 1
    assert host.call_count("cuMemFreeAsync") == ordered + 1


def test_shareable_block_that_is_registered_is_released_as_before(host):
    arena = gpumem.Arena("host", {"backing": "regions"})
    buffer = arena.allocate(MIB, shareable=True)
    frees = host.call_count("cuMemFree")
    buffer.register().release()
    buffer.close()
    arena.close()
    assert arena.stats().reserved == 0
    assert host.call_count("cuMemFree") == frees


def test_block_for_ipc_counts_against_the_limit_and_the_budget():
    budget = gpumem.Budget(8 * MIB)
    arena = gpumem.Arena("host", {"backing": "virtual"}, budget=budget)
    block = arena.allocate(6 * MIB, transport="ipc")
    assert budget.used == 6 * MIB
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(4 * MIB, transport="ipc")
    block.close()
    arena.shrink()
    assert budget.used == 0


def test_suspend_leaves_a_block_for_ipc_where_it_is():
    arena = gpumem.Arena("host", {"backing": "virtual"})
    paged, buffer = arena.allocate(2 * MIB), arena.allocate(MIB, transport="ipc")
    np.asarray(memoryview(buffer))[:] = 7
    with buffer.register():
        assert arena.sleep() > 0
        assert arena.stats().reserved == MIB
        arena.wake()
    assert (np.asarray(memoryview(buffer)) == 7).all()
    paged.close()


@pytest.mark.parametrize("transport", ["nic", "", "IPC", 3, True, ["ipc"]])
def test_unknown_transport_is_refused_and_changes_nothing(transport, arena):
    with pytest.raises(ValueError, match="transport"):
        arena.allocate(1000, transport=transport)
    assert arena.stats().num_allocs == 0


def test_memory_that_cannot_be_registered_is_refused_with_its_reason():
    class Upstream:
        def allocate(self, nbytes):
            return None

        def free(self, address, nbytes):
            raise AssertionError

    with pytest.raises(ConfigError, match="source"):
        gpumem.Arena("host", source=Upstream()).allocate(1000, transport="ipc")
    with pytest.raises(ConfigError, match="managed"):
        gpumem.Arena("host/managed").allocate(1000, transport="ipc")
    with pytest.raises(ConfigError, match="shareable"):
        gpumem.Arena("host").allocate(1000, transport="ipc", shareable=True)
    with pytest.raises(ConfigError, match="only an Arena"):
        gpumem.DriverPool("host").allocate(1000, transport="ipc")
    arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
    with arena.capture(stream), pytest.raises(ConfigError, match="captured"):
        arena.allocate(1000, stream, transport="ipc")


def test_run_passes_the_transport_to_the_arena_of_its_session():
    placed = []

    def work(ctx):
        with ctx.allocator.allocate(MIB, transport="ipc") as buffer:
            placed.append(driver_allocation(buffer.ptr)[0] == buffer.ptr)

    with gpumem.Session("host") as session:
        session.run(work)
    assert placed == [True]


# ---- registrations -------------------------------------------------------------------------------


def test_registered_block_outlives_its_buffer_and_is_not_reused(arena):
    buffer = arena.allocate(MIB)
    address, registration = buffer.ptr, buffer.register()
    assert (registration.address, registration.nbytes) == (address, MIB)
    buffer.close()
    assert arena.allocate(MIB).ptr != address
    registration.release()
    assert registration.released
    registration.release()
    assert arena.allocate(MIB).ptr == address


@pytest.mark.parametrize("config", CONFIGS)
def test_region_of_a_registered_block_is_not_given_back(config):
    arena = gpumem.Arena("host", config)
    buffer = arena.allocate(MIB, transport="ipc")
    registration = buffer.register()
    buffer.close()
    assert arena.shrink().released_bytes == 0
    with pytest.raises(InUseError):
        arena.close()
    registration.release()
    arena.close()
    assert arena.stats().reserved == 0


def test_suspend_is_refused_while_a_block_in_pages_is_registered():
    arena = gpumem.Arena("host", {"backing": "virtual"})
    buffer = arena.allocate(MIB)
    one, other = buffer.register(), buffer.register()
    for held, registration in ((2, one), (1, other)):
        with pytest.raises(InUseError, match=f"{held} registration"):
            arena.sleep()
        registration.release()
    assert arena.sleep() > 0
    arena.wake()


def test_dropped_registration_lets_the_block_go():
    arena = gpumem.Arena("host", {"backing": "virtual"})
    buffer = arena.allocate(MIB)
    registration = buffer.register()
    buffer.close()
    del registration
    gc.collect()
    assert arena.stats().in_use == 0
    assert arena.sleep() >= 0


def test_registration_of_nothing_is_refused(arena):
    buffer = arena.allocate(1000)
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.register()
    with pytest.raises(ValueError, match="empty"):
        arena.allocate(0).register()
    with pytest.raises(TypeError, match="register"):
        Registration()


# ---- which ways ----------------------------------------------------------------------------------


def test_ways_of_host_memory():
    arena = gpumem.Arena("host", {"backing": "virtual"})
    plain, shared = arena.allocate(1000), arena.allocate(1000, shareable=True)
    assert plain.transports() == Transports(False, False, False, False, (), True)
    assert plain.transports() == transports(plain) == transports(plain.ptr + 999)
    assert shared.transports().posix_fd
    tensor = gpumem.from_dlpack(plain)
    assert tensor.transports() == transports(tensor) == plain.transports()


def test_pool_made_to_be_shared_has_a_descriptor():
    for shareable in (False, True):
        with gpumem.DriverPool("host", {"shareable": shareable}) as pool:
            buffer = pool.allocate(1000)
            assert buffer.transports().posix_fd == shareable
            buffer.close()


def test_ways_of_what_is_no_memory():
    with pytest.raises(ValueError, match="0x10"):
        transports(16)
    for nothing in ("host", None, -1, True, 2**64, object()):
        with pytest.raises(TypeError, match="Buffer"):
            transports(nothing)
    buffer = gpumem.Arena("host").allocate(1000)
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.transports()


def test_every_device_tells_its_transports():
    for name in ("legacy_ipc", "posix_fd_handles", "fabric_handles", "gpu_direct_rdma"):
        answer = gpumem.Device("host").capabilities[name]
        assert answer.supported or answer.reason

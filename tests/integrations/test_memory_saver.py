"""torch_memory_saver's names over the hooks that PyTorch calls, on arenas of the host device."""

import ctypes

import pytest
from helpers.torch_caller import Caller

import gpumem
from gpumem._testing import torch_hooks
from gpumem.errors import AsleepError, IntegrationError
from gpumem.integrations import memory_saver

MIB = 1 << 20


@pytest.fixture(scope="module")
def caller():
    return Caller()


@pytest.fixture
def arena(monkeypatch):
    arena = gpumem.Arena("host")
    torch_hooks.serve(0, arena)
    monkeypatch.setattr(memory_saver, "_arenas", lambda: [arena])
    yield arena
    torch_hooks.serve(0, gpumem.Arena("host"))
    arena.check_invariants()


@pytest.fixture
def saver():
    return memory_saver.TorchMemorySaver()


def test_region_pauses_and_resumes_what_torch_allocates_in_it(caller, arena, saver, host):
    with saver.region(tag="weights", enable_cpu_backup=True):
        kept = caller.alloc(5 * MIB)
        with saver.disable():
            outside = caller.alloc(3 * MIB)
    with saver.region(tag="weights"):
        dropped = caller.alloc(7 * MIB)
    for address, nbytes in ((kept, 5 * MIB), (outside, 3 * MIB)):
        ctypes.memset(address, 7, nbytes)
    used = host.used(0)
    saver.pause("other")
    assert host.used(0) == used
    saver.pause("weights")
    assert used - host.used(0) >= 12 * MIB
    assert ctypes.string_at(outside, 1) == b"\x07"
    saver.resume()
    assert ctypes.string_at(kept, 5 * MIB) == b"\x07" * (5 * MIB)
    ctypes.memset(dropped, 1, 7 * MIB)
    for address in (kept, outside, dropped):
        caller.free(address)
    assert arena.stats().in_use == 0


def test_regions_with_different_tags_pause_by_themselves(caller, arena, saver):
    blocks = []
    for tag in ("weights", "kv_cache"):
        with saver.region(tag=tag, enable_cpu_backup=True):
            blocks.append(caller.alloc(MIB))
    saver.pause("kv_cache")
    ctypes.memset(blocks[0], 1, MIB)
    with arena.tag("region kv_cache"), pytest.raises(AsleepError):
        arena.allocate(1)
    saver.pause()
    saver.resume("weights")
    assert ctypes.string_at(blocks[0], 1) == b"\x01"
    saver.resume("kv_cache")
    for address in blocks:
        caller.free(address)


def test_block_freed_while_paused_does_not_come_back(caller, arena, saver):
    with saver.region(enable_cpu_backup=True):
        first, second = caller.alloc(4 * MIB), caller.alloc(4 * MIB)
    saver.pause()
    caller.free(first)
    saver.resume()
    assert arena.stats().reserved <= 6 * MIB
    caller.free(second)


def test_torch_is_needed():
    try:
        import torch  # noqa: F401
    except ImportError:
        with pytest.raises(IntegrationError), memory_saver.torch_memory_saver.region("weights"):
            pass

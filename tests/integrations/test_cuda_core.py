"""cuda.core's own classes over host memory, where they need no driver."""

import gc
import threading
import types

import numpy as np
import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.single_block import BLOCK, next_address, single_block_arena
from helpers.threads import in_a_thread

import gpumem
import gpumem.integrations.cuda_core as integration
from gpumem.errors import ConfigError, IntegrationError

core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")

MIB = 1 << 20


@pytest.fixture
def arena():
    with gpumem.Arena("host", {"max_mem": 16 * MIB}) as arena:
        yield arena
        gc.collect()
        arena.check_invariants()


@pytest.fixture
def source(arena):
    return integration.allocator(arena)


def test_cuda_core_buffer_is_arena_memory(source, arena):
    block = source.allocate(1000, stream=None)
    assert isinstance(block, core.Buffer)
    assert (block.size, block.memory_resource) == (1000, source)
    assert source.resource is arena
    view = np.from_dlpack(block)
    view[:] = 7
    assert arena.stats().requested_in_use == 1000
    block.close()
    assert arena.stats().in_use == 0


def test_dropped_cuda_core_buffer_is_freed(source, arena):
    source.allocate(1000, stream=None)
    gc.collect()
    assert arena.stats().in_use == 0


def test_view_keeps_a_dropped_cuda_core_buffer(source, arena):
    view = np.from_dlpack(source.allocate(1000, stream=None))
    gc.collect()
    assert arena.stats().requested_in_use == 1000
    del view
    gc.collect()
    assert arena.stats().in_use == 0


def test_zero_bytes_give_a_cuda_core_buffer(source, arena):
    block = source.allocate(0, stream=None)
    assert (int(block.handle), block.size) == (0, 0)
    block.close()


def test_cuda_core_resource_reports_accessibility(source):
    assert (source.is_device_accessible, source.is_host_accessible) == (False, True)
    assert (source.device_id, source.is_managed) == (-1, False)


def test_out_of_memory_is_gpumems_error(source):
    with pytest.raises(gpumem.OutOfMemoryError):
        source.allocate(17 * MIB, stream=None)


def test_gpumem_buffer_is_shown_without_a_copy(arena):
    block = arena.allocate(1000)
    shown = integration.buffer(block)
    np.from_dlpack(block)[:] = 5
    assert (int(shown.handle), shown.size) == (block.ptr, 1000)
    assert np.from_dlpack(shown).min() == 5
    block.close()
    assert arena.stats().requested_in_use == 1000, "the view keeps the memory"
    shown.close()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("last", ["theirs", "ours"])
def test_recorded_stream_delays_reuse_whichever_buffer_ends_last(make_arena, host, last):
    arena, pin = single_block_arena(make_arena)
    own, side = gpumem.Stream("host"), gpumem.Stream("host")
    block = arena.allocate(BLOCK, own)
    address, shown = block.ptr, integration.buffer(block)
    block.record_stream(side)
    with HostDriver().block(side):
        for end in (block, shown) if last == "theirs" else (shown, block):
            assert arena.stats().in_use > 256
            end.close()
        assert next_address(arena, own) is None
    side.synchronize()
    assert next_address(arena, own) == address
    pin.close()


def test_closed_buffer_is_refused(arena):
    block = arena.allocate(1)
    block.close()
    with pytest.raises(gpumem.errors.ClosedError):
        integration.buffer(block)


def test_cuda_core_resource_serves_gpumem(source, arena):
    resource = integration.resource(source, name="theirs")
    with resource.allocate(1000) as block:
        np.from_dlpack(block)[:] = 1
        assert arena.stats().requested_in_use == 1000
    assert arena.stats().in_use == 0
    with gpumem.Arena("host", source=resource) as over, over.allocate(100):
        assert arena.stats().in_use > 0
    assert arena.stats().in_use == 0


def test_invalid_arguments_are_named(arena):
    with pytest.raises(TypeError, match=r"7 is not a gpumem\.MemoryResource"):
        integration.allocator(7)
    with pytest.raises(TypeError, match=r"7 is not a gpumem\.Buffer"):
        integration.buffer(7)
    with pytest.raises(TypeError, match=r"is not a cuda\.core\.MemoryResource"):
        integration.resource(arena)
    with pytest.raises(ConfigError, match="host:0"):
        integration.enable(arena)


def test_enable_without_a_device_is_refused():
    if any(device.type == "cuda" for device in gpumem.devices()):
        pytest.skip("a CUDA device is here; tests/gpu switches it")
    with pytest.raises(IntegrationError, match="no GPU: no NVIDIA driver"):
        integration.enable()


def test_switch_is_per_thread(monkeypatch):
    per_thread = threading.local()

    def device(index):
        if not hasattr(per_thread, "device"):
            per_thread.device = types.SimpleNamespace(memory_resource="own")
        return per_thread.device

    fake = types.SimpleNamespace(**{**vars(core), "Device": device})
    monkeypatch.setattr(integration, "_core", lambda: fake)
    monkeypatch.setattr(integration._CudaCore, "device_type", "host")
    seen = []

    def other():
        seen.append(device(0).memory_resource)
        with pytest.raises(IntegrationError, match="which alone can leave it"):
            use.leave()
        with integration.using():
            seen.append(device(0).memory_resource)
        seen.append(device(0).memory_resource)

    with integration.using() as use:
        here = device(0).memory_resource
        in_a_thread(other)
        assert device(0).memory_resource is here
    assert device(0).memory_resource == "own"
    assert seen[0] == seen[2] == "own"
    assert seen[1] not in ("own", here)


@pytest.mark.parametrize(
    "end", ["", "del arena", "del source", "del shown", "source.keep = source", "shown.close()"]
)
def test_exit_is_quiet(end):
    child.run_quietly(f"""
        import gpumem, gpumem.integrations.cuda_core as integration
        arena = gpumem.Arena("host")
        source = integration.allocator(arena)
        block, shown = source.allocate(100, stream=None), integration.buffer(arena.allocate(100))
        {end}
    """)

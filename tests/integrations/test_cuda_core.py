"""cuda.core's own classes over host memory, where they need no driver."""

import gc
import threading
import types

import numpy as np
import pytest
from helpers import child

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
        arena.validate()


@pytest.fixture
def source(arena):
    return integration.allocator(arena)


def test_a_buffer_is_the_arenas_memory(source, arena):
    block = source.allocate(1000, stream=None)
    assert isinstance(block, core.Buffer)
    assert (block.size, block.memory_resource) == (1000, source)
    assert source.resource is arena
    view = np.from_dlpack(block)
    view[:] = 7
    assert arena.stats().requested_in_use == 1000
    block.close()
    assert arena.stats().in_use == 0


def test_a_dropped_buffer_goes_back(source, arena):
    source.allocate(1000, stream=None)
    gc.collect()
    assert arena.stats().in_use == 0


def test_nothing_is_a_buffer_too(source, arena):
    block = source.allocate(0, stream=None)
    assert (int(block.handle), block.size) == (0, 0)
    block.close()


def test_it_says_who_reaches_its_memory(source):
    assert (source.is_device_accessible, source.is_host_accessible) == (False, True)
    assert (source.device_id, source.is_managed) == (-1, False)


def test_exhaustion_is_gpumems_error(source):
    with pytest.raises(gpumem.OutOfMemoryError):
        source.allocate(17 * MIB, stream=None)


def test_a_gpumem_buffer_is_shown_without_a_copy(arena):
    block = arena.allocate(1000)
    shown = integration.buffer(block)
    np.from_dlpack(block)[:] = 5
    assert (int(shown.handle), shown.size) == (block.ptr, 1000)
    assert np.from_dlpack(shown).min() == 5
    block.close()
    assert arena.stats().requested_in_use == 1000, "the view keeps the memory"
    shown.close()
    assert arena.stats().in_use == 0


def test_a_closed_buffer_is_not_shown(arena):
    block = arena.allocate(1)
    block.close()
    with pytest.raises(gpumem.errors.ClosedError):
        integration.buffer(block)


def test_their_resource_serves_gpumem(source, arena):
    resource = integration.resource(source, name="theirs")
    with resource.allocate(1000) as block:
        np.from_dlpack(block)[:] = 1
        assert arena.stats().requested_in_use == 1000
    assert arena.stats().in_use == 0
    with gpumem.Arena("host", source=resource) as over, over.allocate(100):
        assert arena.stats().in_use > 0
    assert arena.stats().in_use == 0


def test_what_is_not_accepted_is_named(arena):
    with pytest.raises(TypeError, match=r"7 is not a gpumem\.MemoryResource"):
        integration.allocator(7)
    with pytest.raises(TypeError, match=r"7 is not a gpumem\.Buffer"):
        integration.buffer(7)
    with pytest.raises(TypeError, match=r"is not a cuda\.core\.MemoryResource"):
        integration.resource(arena)
    with pytest.raises(ConfigError, match="host:0"):
        integration.enable(arena)


def test_without_a_device_enable_says_so():
    if any(device.type == "cuda" for device in gpumem.devices()):
        pytest.skip("a CUDA device is here; tests/gpu switches it")
    with pytest.raises(IntegrationError, match="no CUDA device answers"):
        integration.enable()


def test_each_thread_has_its_own_devices_and_its_own_switch(monkeypatch):
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
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert device(0).memory_resource is here
    assert device(0).memory_resource == "own"
    assert seen[0] == seen[2] == "own"
    assert seen[1] not in ("own", here)


@pytest.mark.parametrize(
    "end", ["", "del arena", "del source", "del shown", "source.keep = source", "shown.close()"]
)
def test_the_end_of_the_process_is_quiet(end):
    child.run_quietly(
        f"""
        import gpumem, gpumem.integrations.cuda_core as integration
        arena = gpumem.Arena("host")
        source = integration.allocator(arena)
        block, shown = source.allocate(100, stream=None), integration.buffer(arena.allocate(100))
        {end}
        """
    )

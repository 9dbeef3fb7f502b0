"""cuda.core on gpumem's memory, on a GPU, and the other way round."""

import gc

import pytest
from helpers.single_block import BLOCK, next_address, single_block_arena

import gpumem
import gpumem.integrations.cuda_core as integration

core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")

MIB = 1 << 20


@pytest.fixture
def device():
    device = core.Device(0)
    device.set_current()
    return device


def read(buffer):
    return set(gpumem.from_dlpack(buffer).to("host").numpy().ravel().tolist())


def test_cuda_core_device_allocates_from_the_arena(device, arena):
    before = device.memory_resource
    stream = device.create_stream()
    with integration.using(arena):
        block = device.allocate(MIB, stream=stream)
        assert arena.stats().requested_in_use == MIB
        assert (block.device_id, block.is_device_accessible) == (0, True)
        block.fill(7, stream=stream)
        stream.sync()
        assert read(block) == {7}
        block.close(stream)
        assert arena.stats().requested_in_use == 0
    assert device.memory_resource is before


def test_block_closed_on_another_stream_is_reused_there_at_once_and_elsewhere_later(
    device, make_arena, gate
):
    arena, pin = single_block_arena(lambda config: make_arena(config, "cuda:0"))
    own, closing = device.create_stream(), device.create_stream()
    block = integration.allocator(arena).allocate(BLOCK, stream=own)
    address = int(block.handle)
    gate.hold(closing.__cuda_stream__()[1])
    block.close(closing)
    assert next_address(arena, own) is None
    assert next_address(arena, closing) == address
    gate.open()
    closing.sync()
    assert next_address(arena, own) == address
    pin.close()


def test_none_means_the_default_resource(device):
    with integration.using(), gpumem.using_resource(gpumem.Arena("cuda:0")) as default:
        block = device.allocate(MIB, stream=device.default_stream)
        assert default.stats().requested_in_use == MIB
        block.close()


def test_pinned_memory_is_host_and_device_accessible(device):
    pinned = gpumem.Arena("cuda:0/host_accessible")
    source = integration.allocator(pinned)
    assert (source.is_device_accessible, source.is_host_accessible) == (True, True)
    block = source.allocate(1000, stream=device.default_stream)
    block.fill(3, stream=device.default_stream)
    device.sync()
    assert read(block) == {3}
    block.close()


def test_gpumem_buffer_is_shown_without_a_copy(device, arena):
    block = arena.allocate(MIB)
    shown = integration.buffer(block)
    assert (int(shown.handle), shown.size) == (block.ptr, MIB)
    shown.fill(9, stream=device.default_stream)
    device.sync()
    assert read(block) == {9}
    block.close()
    assert arena.stats().requested_in_use == MIB
    shown.close()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("kind", ["DeviceMemoryResource", "LegacyPinnedMemoryResource"])
def test_cuda_core_resource_serves_gpumem(device, kind):
    made = getattr(core, kind)
    source = made(0) if kind == "DeviceMemoryResource" else made()
    memory = None if kind == "DeviceMemoryResource" else "cuda:0/host_accessible"
    resource = integration.resource(source, memory=memory)
    tensor = gpumem.zeros((1000,), "float32", resource=resource)
    assert float(tensor.to("host").numpy().sum()) == 0
    del tensor
    with gpumem.Arena(resource.memory, source=resource) as over, over.allocate(MIB) as block:
        assert block.nbytes == MIB
    gc.collect()
    assert resource.stats().in_use == 0


def test_capture_is_served_from_a_graph_pool(device, arena):
    source = integration.allocator(arena)
    stream = device.create_stream()
    warm = source.allocate(MIB, stream=stream)
    address = int(warm.handle)
    warm.close(stream)
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert int(driver.cuStreamBeginCapture(stream.handle, mode)[0]) == 0
    block = source.allocate(MIB, stream=stream)
    inside = int(block.handle)
    block.fill(5, stream=stream)
    status, graph = driver.cuStreamEndCapture(stream.handle)
    assert int(status) == 0
    assert inside != address
    block.close(stream)
    assert int(driver.cuGraphDestroy(graph)[0]) == 0

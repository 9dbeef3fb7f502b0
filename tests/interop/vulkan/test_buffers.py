"""Buffers that Vulkan allocated, seen by NumPy and others, in both directions."""

import gc
import multiprocessing
import os

import numpy as np
import pytest
from helpers import vulkan_child
from helpers.files import no_file_left

import gpumem
from gpumem.interop import MemoryHandleType


def words(memory):
    return memory.tensor(memory.nbytes // 4, "uint32").numpy()


def test_numpy_sees_what_vulkan_fills(device, importer):
    with device.allocate(100_000) as buffer:
        memory = importer.import_memory(buffer.descriptor(), consume=True)
        device.fill(buffer, 0xDEADBEEF)
        device.synchronize()
        assert (words(memory) == 0xDEADBEEF).all()


def test_vulkan_sees_what_numpy_writes(device, importer):
    with device.allocate(4096) as source, device.allocate(4096) as destination:
        ours = importer.import_memory(source.descriptor(), consume=True)
        theirs = importer.import_memory(destination.descriptor(), consume=True)
        words(ours)[...] = np.arange(1024, dtype=np.uint32)
        device.copy(destination, source)
        device.synchronize()
        assert (words(theirs) == np.arange(1024)).all()


def test_offsets_of_fills_and_copies_are_bytes(device, importer):
    with device.allocate(64) as a, device.allocate(64) as b:
        memory = importer.import_memory(b.descriptor(), consume=True)
        device.fill(a, 1)
        device.fill(b, 0)
        device.fill(a, 2, offset=8, nbytes=4)
        device.copy(b, a, nbytes=8, source_offset=4, destination_offset=32)
        device.synchronize()
        assert words(memory).tolist() == [0] * 8 + [1, 2] + [0] * 6


def test_torch_shares_the_bytes(device, importer):
    torch = pytest.importorskip("torch")
    with device.allocate(4096) as buffer:
        memory = importer.import_memory(buffer.descriptor(), consume=True)
        tensor = torch.from_dlpack(memory.tensor((32, 32), "float32"))
        device.fill(buffer, 0x40400000)
        device.synchronize()
        assert (tensor == 3.0).all()
        tensor.fill_(5.0)
        assert (words(memory) == 0x40A00000).all()


def test_descriptor_describes_the_allocation(device):
    with device.allocate(100) as buffer:
        descriptor = buffer.descriptor()
        assert descriptor.handle_type is MemoryHandleType.LAVAPIPE_OPAQUE_FD
        assert descriptor.handle.kind is MemoryHandleType.LAVAPIPE_OPAQUE_FD
        assert descriptor.size == buffer.allocation_size >= buffer.nbytes == 100
        assert descriptor.device_uuid == gpumem.Device("host").uuid
        assert not os.get_inheritable(descriptor.handle.fileno())


def test_each_export_has_its_own_descriptor(device, importer):
    with device.allocate(4096) as buffer:
        first, second = buffer.descriptor(), buffer.descriptor()
        assert first.handle.fileno() != second.handle.fileno()
        first.handle.close()
        memory = importer.import_memory(second)
        assert not second.handle.closed
        device.fill(buffer, 7)
        device.synchronize()
        assert words(memory)[0] == 7


def test_mapping_outlives_the_buffer_and_its_device(importer):
    from gpumem.interop.vulkan import VulkanDevice

    with VulkanDevice("host") as device, device.allocate(1 << 20) as buffer:
        device.fill(buffer, 0x01020304)
        device.synchronize()
        memory = importer.import_memory(buffer.descriptor(), consume=True)
        view = words(memory)
    assert device.closed
    assert (view == 0x01020304).all()
    view[0] = 9
    del memory
    assert view[0] == 9


def test_closed_buffer_stays_until_its_work_is_done(device, importer, gate):
    """The fill waits for a value that comes after the buffer was closed."""
    buffer = device.allocate(1 << 16)
    memory = importer.import_memory(buffer.descriptor(), consume=True)
    device.fill(buffer, 3, wait=(gate, 1))
    buffer.close()
    device.collect()
    assert not words(memory).any()
    gate.signal(1)
    device.synchronize()
    assert (words(memory) == 3).all()


def test_descriptors_are_released(device, importer):
    with no_file_left():
        for _ in range(20):
            with device.allocate(4096) as buffer:
                importer.import_memory(buffer.descriptor(), consume=True).close()
                importer.import_memory(buffer.descriptor()).close()
                buffer.descriptor()
        device.synchronize()


def test_dropped_buffer_is_freed(device):
    device.allocate(4096)
    gc.collect()
    device.close()
    assert device.closed


@pytest.fixture
def other():
    """Start functions in a process of its own; gives the connection to it."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(function):
        here, there = context.Pipe()
        child = context.Process(target=function, args=(there,))
        child.start()
        there.close()
        started.append((child, here))
        return here

    yield start
    for child, here in started:
        here.close()
        child.join(60)
        assert child.exitcode == 0


def test_other_process_reads_and_writes_a_vulkan_buffer(device, importer, other):
    with device.allocate(1 << 16) as buffer, device.allocate(1 << 16) as copied:
        device.fill(buffer, 41)
        device.synchronize()
        connection = other(vulkan_child.read_and_answer)
        descriptor = buffer.descriptor()
        connection.send(descriptor)
        assert connection.recv() == (41, 41)
        assert connection.recv() == "written"
        device.copy(copied, buffer)
        device.synchronize()
        memory = importer.import_memory(copied.descriptor(), consume=True)
        assert (words(memory) == 42).all()


def test_buffer_outlives_the_process_that_exported_it(importer, other):
    connection = other(vulkan_child.produce)
    memory = importer.import_memory(connection.recv(), consume=True)
    connection.send("seen")
    connection.close()
    assert (words(memory) == 0xC0FFEE).all()

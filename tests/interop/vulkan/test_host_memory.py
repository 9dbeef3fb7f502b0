"""Memory of this process that Vulkan writes: NumPy's, an arena's, a file's."""

import mmap
import os

import numpy as np
import pytest

import gpumem
from gpumem.interop import MemoryDescriptor, MemoryHandleType


@pytest.fixture
def alignment(device):
    from shared_buffer import pointer_alignment

    return pointer_alignment(device)


def pages(nbytes, alignment):
    """Return an array of NumPy's that begins at a page."""
    whole = np.zeros(nbytes + alignment, np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + nbytes]


def test_vulkan_fills_a_numpy_array(device, alignment):
    array = pages(1 << 16, alignment)
    with device.import_host(array) as buffer:
        device.fill(buffer, 0x11223344)
        device.synchronize()
    assert (array.view(np.uint32) == 0x11223344).all()


def test_tensor_over_the_array_sees_vulkans_writes(device, importer, alignment):
    array = pages(4096, alignment)
    described = MemoryDescriptor(array, MemoryHandleType.HOST_ALLOCATION, 4096)
    with importer.import_memory(described) as memory:
        tensor = memory.tensor((32, 32), "int32")
        with device.import_host(array) as buffer:
            device.fill(buffer, 9)
            device.synchronize()
        assert (tensor.numpy() == 9).all()
        del tensor


def test_vulkan_fills_an_arena_block(device, arena, alignment):
    size = 2 * alignment
    with arena.allocate(size + alignment) as block:
        view = np.from_dlpack(block)
        start = -block.ptr % alignment
        with device.import_host(view[start : start + size]) as buffer:
            device.fill(buffer, 6)
            device.synchronize()
        assert (view[start : start + size].view(np.uint32) == 6).all()
        del view, buffer


def test_vulkan_fills_a_shared_memfd(device, importer):
    number = os.memfd_create("frame")
    os.truncate(number, 8192)
    memory = importer.import_memory(MemoryDescriptor(number, MemoryHandleType.MEMFD, 8192))
    with mmap.mmap(number, 8192) as mapped, device.import_host(mapped) as buffer:
        device.fill(buffer, 4)
        device.synchronize()
        buffer.close()
        device.synchronize()
    os.close(number)
    assert (memory.tensor(2048, "uint32").numpy() == 4).all()


def test_vulkan_fills_a_pinned_tensor(device, alignment):
    tensor = gpumem.zeros(3 * 1024, "uint32", memory="host/host_accessible")
    array = tensor.numpy().view(np.uint8)
    start = -array.ctypes.data % alignment
    part = array[start : start + 4096]
    with device.import_host(part) as buffer:
        device.fill(buffer, 0xFFFFFFFF)
        device.synchronize()
    assert (part == 255).all()

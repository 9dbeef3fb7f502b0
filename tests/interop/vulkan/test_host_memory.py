"""Memory of this process that Vulkan writes: NumPy's, an arena's, a file's."""

import gc
import mmap
import os
import weakref

import numpy as np
import pytest

import gpumem
from gpumem.errors import AlignmentError, InvalidDescriptorError, UnsupportedHandleTypeError
from gpumem.interop import MemoryDescriptor, MemoryHandleType


def pages(nbytes, alignment):
    """Return an array of NumPy's that begins at a page."""
    whole = np.zeros(nbytes + alignment, np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + nbytes]


def test_vulkan_fills_a_numpy_array(device):
    array = pages(1 << 16, device.pointer_alignment)
    with device.import_host(array) as buffer:
        device.fill(buffer, 0x11223344)
        device.synchronize()
    assert (array.view(np.uint32) == 0x11223344).all()


def test_vulkan_reads_what_numpy_wrote(device, importer):
    array = pages(4096, device.pointer_alignment)
    array[:] = np.arange(4096) % 251
    with device.import_host(array) as source, device.allocate(4096) as destination:
        memory = importer.import_memory(destination.descriptor(), consume=True)
        device.copy(destination, source)
        device.synchronize()
        assert (memory.tensor(4096, "uint8").numpy() == array).all()


def test_tensor_over_the_array_sees_vulkans_writes(device, importer):
    array = pages(4096, device.pointer_alignment)
    described = MemoryDescriptor(array, MemoryHandleType.HOST_ALLOCATION, 4096)
    with importer.import_memory(described) as memory:
        tensor = memory.tensor((32, 32), "int32")
        with device.import_host(array) as buffer:
            device.fill(buffer, 9)
            device.synchronize()
        assert (tensor.numpy() == 9).all()
        del tensor


def test_vulkan_fills_an_arena_block(device, arena):
    size = 2 * device.pointer_alignment
    with arena.allocate(size + device.pointer_alignment) as block:
        view = np.from_dlpack(block)
        start = -block.ptr % device.pointer_alignment
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


def test_host_memory_is_kept_until_vulkan_is_done(device, gate):
    """A buffer's memory must not go while commands that write it are queued."""
    array = pages(4096, device.pointer_alignment)
    gone = weakref.ref(array.base)
    buffer = device.import_host(array)
    del array
    device.fill(buffer, 1, wait=(gate, 1))
    buffer.close()
    del buffer
    gc.collect()
    device.collect()
    assert gone() is not None
    gate.signal(1)
    device.synchronize()
    gc.collect()
    assert gone() is None


def test_unaligned_or_non_contiguous_host_memory_is_refused(device):
    array = pages(3 * 4096, device.pointer_alignment)
    with pytest.raises(AlignmentError, match="address"):
        device.import_host(array[64 : 64 + 4096])
    with pytest.raises(AlignmentError, match="size 4160"):
        device.import_host(array[:4160])
    with pytest.raises(InvalidDescriptorError, match="contiguous"):
        device.import_host(array[::2])
    with pytest.raises(InvalidDescriptorError, match="empty"):
        device.import_host(array[:0])
    array.flags.writeable = False
    with pytest.raises(InvalidDescriptorError, match="read-only"):
        device.import_host(array)
    with pytest.raises(InvalidDescriptorError, match="no buffer"):
        device.import_host(array.ctypes.data)
    device.close()


def test_host_memory_needs_no_descriptor(device):
    with (
        device.import_host(pages(4096, device.pointer_alignment)) as buffer,
        pytest.raises(UnsupportedHandleTypeError, match="HOST_ALLOCATION"),
    ):
        buffer.descriptor()


def test_vulkan_fills_a_pinned_tensor(device):
    tensor = gpumem.zeros(3 * 1024, "uint32", memory="host/host_accessible")
    array = tensor.numpy().view(np.uint8)
    start = -array.ctypes.data % device.pointer_alignment
    part = array[start : start + 4096]
    with device.import_host(part) as buffer:
        device.fill(buffer, 0xFFFFFFFF)
        device.synchronize()
    assert (part == 255).all()

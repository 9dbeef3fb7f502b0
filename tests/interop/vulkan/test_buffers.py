"""Memory that Vulkan allocated, seen by NumPy and others, in both directions."""

import multiprocessing
import os
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from helpers import spawned
from helpers.files import no_file_left

import gpumem
from gpumem.errors import BadHandleError, DeviceMismatchError
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType


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
    from vulkan_device import VulkanDevice

    with VulkanDevice("host") as device, device.allocate(1 << 20) as buffer:
        device.fill(buffer, 0x01020304)
        device.synchronize()
        memory = importer.import_memory(buffer.descriptor(), consume=True)
        view = words(memory)
    assert (view == 0x01020304).all()
    view[0] = 9
    del memory
    assert view[0] == 9


def test_descriptors_are_released(device, importer):
    with no_file_left():
        for _ in range(20):
            with device.allocate(4096) as buffer:
                importer.import_memory(buffer.descriptor(), consume=True).close()
                importer.import_memory(buffer.descriptor()).close()
                buffer.descriptor()
        device.synchronize()


def test_memory_is_imported_at_the_offset_of_a_buffer_in_it(device, importer):
    """A buffer in the middle of an allocation: the descriptor has the whole and the offset."""
    from shared_buffer import export_memory

    with device.allocate(1 << 16) as buffer:
        described = export_memory(device, buffer.memory, buffer.allocation_size, offset=8192)
        memory = importer.import_memory(described, consume=True)
        assert (memory.size, memory.offset) == (buffer.allocation_size, 8192)
        device.fill(buffer, 77)
        device.synchronize()
        seen = memory.tensor(1024, "uint32").numpy()
        seen[0] = 78
        whole = words(importer.import_memory(buffer.descriptor(), consume=True))
        assert whole[2047:2050].tolist() == [77, 78, 77]


def test_linear_image_is_a_tensor_with_its_row_pitch(device, importer):
    from shared_buffer import export_memory

    width, height = 37, 5
    with linear_image(device, width, height) as (image, memory, size, layout):
        assert layout.rowPitch > 4 * width  # so that a wrong pitch would be seen
        memory = importer.import_memory(export_memory(device, memory, size), consume=True)
        device.run(lambda commands: clear(commands, image, (1.0, 0.0, 1.0, 0.0)))
        device.synchronize()
        texels = memory.tensor(
            (height, width, 4), "uint8", offset=layout.offset, strides=(layout.rowPitch, 4, 1)
        ).numpy()
        assert (texels == (255, 0, 255, 0)).all()
        rows = memory.tensor(
            (height, 4 * width), "uint8", offset=layout.offset, row_pitch=layout.rowPitch
        ).numpy()
        assert (rows.reshape(height, width, 4) == texels).all()


@contextmanager
def linear_image(device, width, height):
    """Make an RGBA image of linear tiling; yields it, its memory and size, and its layout."""
    import vulkan as vk
    from shared_buffer import OPAQUE_FD

    info = vk.VkImageCreateInfo(
        pNext=vk.VkExternalMemoryImageCreateInfo(handleTypes=OPAQUE_FD),
        imageType=vk.VK_IMAGE_TYPE_2D,
        format=vk.VK_FORMAT_R8G8B8A8_UNORM,
        extent=vk.VkExtent3D(width=width, height=height, depth=1),
        mipLevels=1,
        arrayLayers=1,
        samples=vk.VK_SAMPLE_COUNT_1_BIT,
        tiling=vk.VK_IMAGE_TILING_LINEAR,
        usage=vk.VK_IMAGE_USAGE_TRANSFER_DST_BIT,
    )
    image = vk.vkCreateImage(device.logical, info, None)
    size = vk.vkGetImageMemoryRequirements(device.logical, image).size
    export = vk.VkExportMemoryAllocateInfo(handleTypes=OPAQUE_FD)
    asked = vk.VkMemoryAllocateInfo(pNext=export, allocationSize=size, memoryTypeIndex=0)
    memory = vk.vkAllocateMemory(device.logical, asked, None)
    vk.vkBindImageMemory(device.logical, image, memory, 0)
    part = vk.VkImageSubresource(aspectMask=vk.VK_IMAGE_ASPECT_COLOR_BIT)
    yield image, memory, size, vk.vkGetImageSubresourceLayout(device.logical, image, part)
    vk.vkDestroyImage(device.logical, image, None)
    vk.vkFreeMemory(device.logical, memory, None)


def clear(commands, image, colour):
    import vulkan as vk

    general = vk.VK_IMAGE_LAYOUT_GENERAL
    everything = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
    whole = vk.VkImageSubresourceRange(
        aspectMask=vk.VK_IMAGE_ASPECT_COLOR_BIT, levelCount=1, layerCount=1
    )
    ready = vk.VkImageMemoryBarrier(
        dstAccessMask=vk.VK_ACCESS_TRANSFER_WRITE_BIT,
        newLayout=general,
        srcQueueFamilyIndex=vk.VK_QUEUE_FAMILY_IGNORED,
        dstQueueFamilyIndex=vk.VK_QUEUE_FAMILY_IGNORED,
        image=image,
        subresourceRange=whole,
    )
    vk.vkCmdPipelineBarrier(commands, everything, everything, 0, 0, None, 0, None, 1, [ready])
    value = vk.VkClearColorValue(float32=colour)
    vk.vkCmdClearColorImage(commands, image, general, value, 1, [whole])


def test_importer_of_another_device_refuses_the_descriptor(device, monkeypatch):
    with device.allocate(4096) as buffer:
        described = buffer.descriptor()
        monkeypatch.setattr(gpumem.Device, "uuid", property(lambda self: "cd" * 16))
        with (
            Importer.for_device("host") as importer,
            pytest.raises(DeviceMismatchError, match=f"{'cd' * 16}"),
        ):
            importer.import_memory(described, consume=True)
        assert not described.handle.closed


def test_device_is_found_by_its_uuid_only(device, monkeypatch):
    """A CUDA device with a UUID that Vulkan does not list: a name or the order does not do."""
    import vulkan as vk
    from vulkan_device import physical_device_for

    monkeypatch.setattr(gpumem.Device, "uuid", property(lambda self: "ab" * 16))
    with pytest.raises(LookupError, match=r"cuda:0 \((ab){16}\): there are .*llvmpipe"):
        physical_device_for(gpumem.Device("cuda:0"), device.instance)
    identity = vk.VkPhysicalDeviceIDProperties()
    info = vk.VkPhysicalDeviceProperties2(pNext=identity)
    vk.vkGetPhysicalDeviceProperties2(device.physical, info)
    uuid = bytes(identity.deviceUUID).hex()
    monkeypatch.setattr(gpumem.Device, "uuid", property(lambda self: uuid))
    assert physical_device_for(gpumem.Device("cuda:0"), device.instance)[1]


def test_import_larger_than_the_allocation_is_refused(device, importer):
    with device.allocate(4096) as buffer, no_file_left():
        described = replace(buffer.descriptor(), size=2 * buffer.allocation_size)
        with pytest.raises(BadHandleError, match=r"fewer bytes than described, 8\.0 KiB"):
            importer.import_memory(described, consume=True)
        os.fstat(described.handle.fileno())
        described.handle.close()


def test_file_without_lavapipes_header_is_refused(importer):
    number = os.memfd_create("plain")
    os.truncate(number, 8192)
    with pytest.raises(BadHandleError, match="not one of lavapipe's"):
        importer.import_memory(MemoryDescriptor(number, MemoryHandleType.LAVAPIPE_OPAQUE_FD, 4096))
    os.close(number)


@pytest.fixture
def other():
    """Start functions in a process of its own; returns the connection to it."""
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
        connection = other(spawned.read_and_answer_memory)
        descriptor = buffer.descriptor()
        connection.send(descriptor)
        assert connection.recv() == (41, 41)
        assert connection.recv() == "written"
        device.copy(copied, buffer)
        device.synchronize()
        memory = importer.import_memory(copied.descriptor(), consume=True)
        assert (words(memory) == 42).all()


def test_buffer_outlives_the_process_that_exported_it(importer, other):
    connection = other(spawned.produce_vulkan_buffer)
    memory = importer.import_memory(connection.recv(), consume=True)
    connection.send("seen")
    connection.close()
    assert (words(memory) == 0xC0FFEE).all()

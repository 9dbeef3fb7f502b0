"""An application's own instance, device, memory and images: nothing of them is taken over."""

import pytest
from helpers import engine as application

import gpumem
from gpumem.errors import ConfigError, DeviceMismatchError, InvalidDescriptorError
from gpumem.interop import Importer
from gpumem.interop.vulkan import VulkanDevice, physical_device_for, physical_devices

NAMES = ("instance", "physical_device", "logical_device", "queue", "queue_family")


@pytest.fixture
def engine():
    with application.engine("VK_KHR_external_memory_fd") as engine:
        yield engine


def handles(engine):
    return {name: getattr(engine, name) for name in NAMES}


def test_application_device_is_used_and_left_alone(engine, importer, vk):
    with VulkanDevice("host", **handles(engine)) as device, device.allocate(4096) as buffer:
        assert device.logical_device == engine.logical_device
        memory = importer.import_memory(buffer.descriptor(), consume=True)
        device.fill(buffer, 5)
        device.synchronize()
        assert memory.tensor(1024, "uint32").numpy()[-1] == 5
    vk.vkDeviceWaitIdle(engine.logical_device)


def test_vulkan_handles_may_be_integers(engine, vk):
    plain = {
        name: handle if isinstance(handle, int) else int(vk.ffi.cast("uintptr_t", handle))
        for name, handle in handles(engine).items()
    }
    with VulkanDevice("host", **plain) as device, device.allocate(64) as buffer:
        device.fill(buffer, 1)
        device.synchronize()


def test_application_instance_alone_is_enough(engine):
    with VulkanDevice("host", instance=engine.instance) as device:
        assert device.logical_device != engine.logical_device
    assert physical_devices(engine.instance)


@pytest.mark.parametrize("left_out", NAMES)
def test_incomplete_sets_of_handles_are_refused(engine, left_out):
    given = {name: handle for name, handle in handles(engine).items() if name != left_out}
    with pytest.raises(ConfigError, match="go together"):
        VulkanDevice("host", **given)


def test_application_memory_is_imported_at_an_offset(engine, importer, vk):
    """A buffer in the middle of an allocation: the descriptor has the whole and the offset."""
    with VulkanDevice("host", **handles(engine)) as device:
        allocation = application.exportable_memory_of(engine, 1 << 16)
        buffer = application.buffer_in(engine, allocation, 4096, 8192)
        described = device.export_memory(allocation, 1 << 16, offset=8192)
        memory = importer.import_memory(described, consume=True)
        assert (memory.size, memory.offset) == (1 << 16, 8192)
        device.run(lambda commands: vk.vkCmdFillBuffer(commands, buffer, 0, 4096, 77))
        device.synchronize()
        seen = memory.tensor(1025, "uint32").numpy()
        assert (seen[:1024] == 77).all()
        assert seen[1024] == 0


def test_linear_image_is_a_tensor_with_its_row_pitch(engine, importer, vk):
    width, height = 37, 5
    with VulkanDevice("host", **handles(engine)) as device:
        image, allocation = application.linear_image_in(engine, width, height)
        layout = device.image_layout(image, vk.VK_IMAGE_TILING_LINEAR)
        assert layout.row_pitch > 4 * width  # so that a wrong pitch would be seen
        described = device.export_memory(allocation.handle, allocation.size)
        memory = importer.import_memory(described, consume=True)
        device.run(lambda commands: clear(vk, commands, image, (1.0, 0.0, 1.0, 0.0)))
        device.synchronize()
        texels = memory.tensor(
            (height, width, 4),
            "uint8",
            offset=layout.offset,
            strides=(layout.row_pitch, 4, 1),
        ).numpy()
        assert (texels == (255, 0, 255, 0)).all()
        rows = memory.tensor(
            (height, 4 * width), "uint8", offset=layout.offset, row_pitch=layout.row_pitch
        ).numpy()
        assert (rows.reshape(height, width, 4) == texels).all()


def clear(vk, commands, image, colour):
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


def test_image_of_optimal_tiling_is_refused(engine, vk):
    with VulkanDevice("host", **handles(engine)) as device:
        image, _ = application.linear_image_in(engine, 8, 8)
        with pytest.raises(InvalidDescriptorError, match="TILING_LINEAR"):
            device.image_layout(image, vk.VK_IMAGE_TILING_OPTIMAL)


def test_device_is_matched_by_uuid_only(engine, monkeypatch):
    """A CUDA device's UUID is nobody's here: neither a name nor the first device stands in."""
    monkeypatch.setattr(gpumem.Device, "uuid", property(lambda self: "ab" * 16))
    with pytest.raises(DeviceMismatchError, match=r"UUID (ab){16} of cuda:0; there: .*llvmpipe"):
        physical_device_for("cuda:0", engine.instance)
    with pytest.raises(DeviceMismatchError, match="llvmpipe"):
        VulkanDevice("cuda:0", **handles(engine))


def test_physical_device_with_the_uuid_is_chosen(engine, monkeypatch):
    there = physical_devices(engine.instance)
    wanted = next(each for each in there if each.is_lavapipe)
    monkeypatch.setattr(gpumem.Device, "uuid", property(lambda self: wanted.uuid))
    assert physical_device_for("cuda:0", engine.instance) == wanted


def test_only_lavapipe_matches_the_host_device(engine, monkeypatch, vk):
    monkeypatch.setattr(vk, "VK_DRIVER_ID_MESA_LLVMPIPE", -1)
    with pytest.raises(DeviceMismatchError, match=r"host:0 takes; there: .*llvmpipe"):
        physical_device_for("host", engine.instance)


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

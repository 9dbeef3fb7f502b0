"""A Vulkan application that knows nothing of gpumem: the package `vulkan` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

OPAQUE_FD = 1


@contextmanager
def engine(*extensions: str) -> Iterator[Any]:
    """Make an instance, the software device with some extensions, and a queue; destroy them."""
    import vulkan as vk

    application = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
    instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)
    physical = next(
        each
        for each in vk.vkEnumeratePhysicalDevices(instance)
        if vk.vkGetPhysicalDeviceProperties(each).deviceType == vk.VK_PHYSICAL_DEVICE_TYPE_CPU
    )
    queues = [vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])]
    features = vk.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=vk.VK_TRUE)
    asked = vk.VkDeviceCreateInfo(
        pNext=features, pQueueCreateInfos=queues, ppEnabledExtensionNames=list(extensions)
    )
    logical = vk.vkCreateDevice(physical, asked, None)
    made: list[Callable[[], None]] = []
    yield SimpleNamespace(
        instance=instance,
        physical_device=physical,
        logical_device=logical,
        queue=vk.vkGetDeviceQueue(logical, 0, 0),
        queue_family=0,
        at_end=made,
    )
    vk.vkDeviceWaitIdle(logical)
    for each in reversed(made):
        each()
    vk.vkDestroyDevice(logical, None)
    vk.vkDestroyInstance(instance, None)


def memory_of(there: Any, nbytes: int, more: Any = None) -> Any:
    """Allocate memory of the first type; freed with the engine."""
    import vulkan as vk

    asked = vk.VkMemoryAllocateInfo(pNext=more, allocationSize=nbytes, memoryTypeIndex=0)
    memory = vk.vkAllocateMemory(there.logical_device, asked, None)
    there.at_end.append(lambda: vk.vkFreeMemory(there.logical_device, memory, None))
    return memory


def exportable_memory_of(there: Any, nbytes: int) -> Any:
    """Allocate memory that can be exported."""
    import vulkan as vk

    return memory_of(there, nbytes, vk.VkExportMemoryAllocateInfo(handleTypes=OPAQUE_FD))


def buffer_in(there: Any, memory: Any, nbytes: int, offset: int) -> Any:
    """Make a buffer and bind it at an offset of exportable memory."""
    import vulkan as vk

    external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=OPAQUE_FD)
    asked = vk.VkBufferCreateInfo(
        pNext=external, size=nbytes, usage=vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    )
    buffer = vk.vkCreateBuffer(there.logical_device, asked, None)
    there.at_end.append(lambda: vk.vkDestroyBuffer(there.logical_device, buffer, None))
    vk.vkBindBufferMemory(there.logical_device, buffer, memory, offset)
    return buffer


def linear_image_in(there: Any, width: int, height: int) -> tuple[Any, Any]:
    """Make an RGBA image of linear tiling in exportable memory; returns both."""
    import vulkan as vk

    external = vk.VkExternalMemoryImageCreateInfo(handleTypes=OPAQUE_FD)
    asked = vk.VkImageCreateInfo(
        pNext=external,
        imageType=vk.VK_IMAGE_TYPE_2D,
        format=vk.VK_FORMAT_R8G8B8A8_UNORM,
        extent=vk.VkExtent3D(width=width, height=height, depth=1),
        mipLevels=1,
        arrayLayers=1,
        samples=vk.VK_SAMPLE_COUNT_1_BIT,
        tiling=vk.VK_IMAGE_TILING_LINEAR,
        usage=vk.VK_IMAGE_USAGE_TRANSFER_DST_BIT,
    )
    image = vk.vkCreateImage(there.logical_device, asked, None)
    needs = vk.vkGetImageMemoryRequirements(there.logical_device, image)
    memory = exportable_memory_of(there, needs.size)
    there.at_end.append(lambda: vk.vkDestroyImage(there.logical_device, image, None))
    vk.vkBindImageMemory(there.logical_device, image, memory, 0)
    return image, SimpleNamespace(handle=memory, size=needs.size)

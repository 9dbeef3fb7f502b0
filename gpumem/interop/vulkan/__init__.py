"""Vulkan's side of an import: buffers and timelines on the device that is a gpumem Device.

A thin helper over the package `vulkan` (``pip install vulkan``). What it gives are plain
descriptors, which any other engine can fill as well: the opaque descriptor that
``vkGetMemoryFdKHR`` returned, the memory's ``allocationSize``, the device's UUID.
"""

from gpumem.interop.vulkan.device import VulkanDevice, availability
from gpumem.interop.vulkan.logical import EXTENSIONS
from gpumem.interop.vulkan.matching import PhysicalDevice, physical_device_for, physical_devices
from gpumem.interop.vulkan.memory import ImageLayout, VulkanBuffer
from gpumem.interop.vulkan.timelines import Bridge, VulkanTimeline

__all__ = [
    "EXTENSIONS",
    "Bridge",
    "ImageLayout",
    "PhysicalDevice",
    "VulkanBuffer",
    "VulkanDevice",
    "VulkanTimeline",
    "availability",
    "physical_device_for",
    "physical_devices",
]

"""Vulkan's buffers: exported to gpumem, or made over memory of the process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import vulkan as vk

from gpumem.interop import Handle, MemoryDescriptor, MemoryHandleType

if TYPE_CHECKING:
    from vulkan_device import VulkanDevice

OPAQUE_FD = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
OF_HOST = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT


class _Buffer:
    """A VkBuffer of `nbytes` with memory of its own."""

    def __init__(self, device: VulkanDevice, nbytes: int, handle_type: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._made = ExitStack()
        copies = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        info = vk.VkBufferCreateInfo(
            pNext=vk.VkExternalMemoryBufferCreateInfo(handleTypes=handle_type),
            size=nbytes,
            usage=copies | vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT,
            sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE,
        )
        self.handle = vk.vkCreateBuffer(device.logical, info, None)
        self._made.callback(vk.vkDestroyBuffer, device.logical, self.handle, None)

    def _allocate(self, more: Any, nbytes: int, types: int, wanted: int = 0) -> None:
        """Allocate memory, of the first of some types, with wanted properties, and bind it."""
        found = vk.vkGetPhysicalDeviceMemoryProperties(self.device.physical)
        number = next(
            each
            for each in range(found.memoryTypeCount)
            if types >> each & 1 and found.memoryTypes[each].propertyFlags & wanted == wanted
        )
        info = vk.VkMemoryAllocateInfo(pNext=more, allocationSize=nbytes, memoryTypeIndex=number)
        try:
            self.memory = vk.vkAllocateMemory(self.device.logical, info, None)
        except BaseException:
            self.close()
            raise
        self._made.callback(vk.vkFreeMemory, self.device.logical, self.memory, None)
        vk.vkBindBufferMemory(self.device.logical, self.handle, self.memory, 0)

    def close(self) -> None:
        """Wait for the queue, and free the buffer and its memory. Idempotent."""
        self.device.synchronize()
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SharedBuffer(_Buffer):
    """A buffer in the device's own memory, which can be exported.

    Attributes
    ----------
    handle : VkBuffer
    memory : VkDeviceMemory
    nbytes : int
        Bytes of the buffer.
    allocation_size : int
        Bytes of the memory, which may be more: the size that an importer needs.
    dedicated : bool
        Whether the memory was allocated for this buffer alone, as some drivers require.
    """

    def __init__(self, device: VulkanDevice, nbytes: int) -> None:
        super().__init__(device, nbytes, OPAQUE_FD)
        alone = vk.VkMemoryDedicatedRequirements()
        needs = vk.VkMemoryRequirements2(pNext=alone)
        asked = vk.VkBufferMemoryRequirementsInfo2(buffer=self.handle)
        vk.vkGetBufferMemoryRequirements2(device.logical, asked, needs)
        required = needs.memoryRequirements
        self.allocation_size = int(required.size)
        self.dedicated = bool(alone.requiresDedicatedAllocation or alone.prefersDedicatedAllocation)
        only = vk.VkMemoryDedicatedAllocateInfo(buffer=self.handle) if self.dedicated else None
        export = vk.VkExportMemoryAllocateInfo(pNext=only, handleTypes=OPAQUE_FD)
        own = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
        self._allocate(export, self.allocation_size, required.memoryTypeBits, own)

    def descriptor(self) -> MemoryDescriptor:
        """Export its memory: a new descriptor at each call, owned by the result's handle.

        The memory lives on while it is imported, also after this buffer is closed.
        """
        return export_memory(self.device, self.memory, self.allocation_size, self.dedicated)


class HostBuffer(_Buffer):
    """A buffer over memory of this process: an array of NumPy, a block of an arena on the host.

    Parameters
    ----------
    device : VulkanDevice
    memory : object with a writable buffer
        Begins and ends at multiples of `pointer_alignment`.
    """

    def __init__(self, device: VulkanDevice, memory: Any) -> None:
        array = np.frombuffer(memory, np.uint8)
        alignment = pointer_alignment(device)
        address = array.ctypes.data
        if address % alignment or array.nbytes % alignment:
            raise ValueError(
                f"{array.nbytes} bytes at {address:#x} are not whole pages of {alignment} bytes"
            )
        super().__init__(device, array.nbytes, OF_HOST)
        self._made.callback(lambda kept: None, array)  # the bytes live as long as Vulkan has them
        needs = vk.vkGetBufferMemoryRequirements(device.logical, self.handle)
        query = vk.vkGetDeviceProcAddr(device.logical, "vkGetMemoryHostPointerPropertiesEXT")
        pointer = vk.ffi.cast("void *", address)
        types = query(device.logical, OF_HOST, pointer).memoryTypeBits & needs.memoryTypeBits
        given = vk.VkImportMemoryHostPointerInfoEXT(handleType=OF_HOST, pHostPointer=pointer)
        self._allocate(given, array.nbytes, types)


def pointer_alignment(device: VulkanDevice) -> int:
    """Return the alignment of a `HostBuffer`'s address and size, in bytes."""
    limits = vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
    info = vk.VkPhysicalDeviceProperties2(pNext=limits)
    vk.vkGetPhysicalDeviceProperties2(device.physical, info)
    return int(limits.minImportedHostPointerAlignment) or 4096


def export_memory(
    device: VulkanDevice, memory: Any, size: int, dedicated: bool = False, offset: int = 0
) -> MemoryDescriptor:
    """Describe a VkDeviceMemory of `size` bytes that was allocated for export.

    `offset` is where the buffer or the image in it was bound.
    """
    lavapipe, opaque = MemoryHandleType.LAVAPIPE_OPAQUE_FD, MemoryHandleType.OPAQUE_FD
    kind = lavapipe if device.is_lavapipe else opaque
    export = vk.vkGetDeviceProcAddr(device.logical, "vkGetMemoryFdKHR")
    number = export(device.logical, vk.VkMemoryGetFdInfoKHR(memory=memory, handleType=OPAQUE_FD))
    return MemoryDescriptor(
        Handle(number, kind=kind),
        kind,
        size,
        offset,
        dedicated=dedicated,
        device_uuid=device.device.uuid,
    )

"""Vulkan's buffers: exported to gpumem, or made of the host's memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gpumem._support.sizes import exact_size, format_size
from gpumem.errors import (
    AlignmentError,
    ConfigError,
    InvalidDescriptorError,
    OutOfBoundsError,
    UnsupportedHandleTypeError,
)
from gpumem.interop.descriptors import MemoryDescriptor, MemoryHandleType, bytes_of
from gpumem.interop.vulkan.calls import (
    call,
    device_function,
    library,
    owned_descriptor,
    typed_handle,
)
from gpumem.interop.vulkan.children import Child
from gpumem.interop.vulkan.logical import LogicalDevice

__all__ = ["BufferDevice", "ImageLayout", "VulkanBuffer"]


@dataclass(frozen=True)
class ImageLayout:
    """Where the texels of a linear image lie, in bytes; see `VulkanDevice.image_layout`.

    A tensor of height x width x channels has strides ``(row_pitch, texel, channel)``.
    """

    offset: int
    nbytes: int
    row_pitch: int
    array_pitch: int
    depth_pitch: int


class BufferDevice(LogicalDevice):
    """What a `VulkanDevice` does with memory."""

    def allocate(self, nbytes: int, *, usage: int | None = None) -> VulkanBuffer:
        """Make a buffer that can be exported, in the device's own memory.

        Parameters
        ----------
        nbytes : int
        usage : int, optional
            ``VkBufferUsageFlags`` beside copies from and to it; None: storage.

        Raises
        ------
        UnsupportedHandleTypeError
            The device exports no such buffer.
        InvalidDescriptorError
            `nbytes` is not from 1 to 2**63 - 1.
        DriverError
            Vulkan refused, for example because memory is out.
        """
        vk = library()
        opaque = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
        wanted = _usage(nbytes, usage)
        info = vk.VkPhysicalDeviceExternalBufferInfo(usage=wanted, handleType=opaque)
        found = call("vkGetPhysicalDeviceExternalBufferProperties", self.physical_device, info)
        features = found.externalMemoryProperties.externalMemoryFeatures
        if not features & vk.VK_EXTERNAL_MEMORY_FEATURE_EXPORTABLE_BIT:
            raise UnsupportedHandleTypeError(
                f"{self.physical.name} exports no buffer of usage {wanted:#x} as a descriptor"
            )
        with self.making_child() as undo:
            handle = _make_buffer(self, undo, nbytes, wanted, opaque)
            size, types, dedicated = _requirements(self, handle)
            dedicated |= bool(features & vk.VK_EXTERNAL_MEMORY_FEATURE_DEDICATED_ONLY_BIT)
            only = vk.VkMemoryDedicatedAllocateInfo(buffer=handle) if dedicated else None
            export = vk.VkExportMemoryAllocateInfo(pNext=only, handleTypes=opaque)
            kind = _memory_type(self, types, vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)
            memory = _make_memory(self, undo, handle, export, size, kind)
            return VulkanBuffer(self, handle, memory, nbytes, size, dedicated)

    def import_host(self, memory: Any, *, usage: int | None = None) -> VulkanBuffer:
        """Make a Vulkan buffer over memory of this process, such as an array of NumPy or a Buffer.

        Parameters
        ----------
        memory : object with a writable buffer
            Begins and ends at multiples of `pointer_alignment`. Kept until the buffer is freed.
        usage : int, optional
            As for `allocate`.

        Raises
        ------
        AlignmentError
            Its address or size is not a multiple of it.
        InvalidDescriptorError
            It has no buffer, or one that is read-only or not contiguous.
        UnsupportedHandleTypeError
            The device lacks ``VK_EXT_external_memory_host``.
        DriverError
            Vulkan refused.
        """
        vk = library()
        kind = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
        name = "vkGetMemoryHostPointerPropertiesEXT"
        function = device_function(self.logical_device, name, "VK_EXT_external_memory_host")
        address, nbytes, view = bytes_of("memory", memory)
        if not nbytes:
            raise InvalidDescriptorError("memory is empty: expected at least one byte")
        _require_pages(address, nbytes, self.pointer_alignment)
        pointer = vk.ffi.cast("void *", address)
        importable = call(name, self.logical_device, kind, pointer, function=function)
        with self.making_child() as undo:
            handle = _make_buffer(self, undo, nbytes, _usage(nbytes, usage), kind)
            size, types, _ = _requirements(self, handle)
            if size > nbytes:
                raise InvalidDescriptorError(
                    f"memory of {exact_size(nbytes)} is too small: Vulkan needs {exact_size(size)} "
                    "for a buffer of that size"
                )
            chosen = _memory_type(self, types & importable.memoryTypeBits, 0)
            host = vk.VkImportMemoryHostPointerInfoEXT(handleType=kind, pHostPointer=pointer)
            allocated = _make_memory(self, undo, handle, host, nbytes, chosen)
            return VulkanBuffer(self, handle, allocated, nbytes, nbytes, False, owner=view)

    @property
    def pointer_alignment(self) -> int:
        """What address and size of `import_host`'s memory are multiples of, in bytes."""
        limits = library().VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
        info = library().VkPhysicalDeviceProperties2(pNext=limits)
        call("vkGetPhysicalDeviceProperties2", self.physical_device, info)
        return int(limits.minImportedHostPointerAlignment) or 4096

    def export_memory(
        self, memory: Any, allocation_size: int, *, offset: int = 0, dedicated: bool = False
    ) -> MemoryDescriptor:
        """Export memory that the application allocated.

        Parameters
        ----------
        memory : VkDeviceMemory
            Allocated with ``VkExportMemoryAllocateInfo`` for an opaque descriptor.
        allocation_size : int
            Its ``allocationSize``, which may be more than the size of the buffer in it.
        offset : int
            Where the buffer was bound.
        dedicated : bool
            Whether it was allocated with ``VkMemoryDedicatedAllocateInfo``.

        Raises
        ------
        BadHandleError
            The memory was not allocated for export.
        InvalidDescriptorError
            A number is out of range.
        DriverError
            Vulkan refused.
        """
        vk = library()
        lavapipe, opaque = MemoryHandleType.LAVAPIPE_OPAQUE_FD, MemoryHandleType.OPAQUE_FD
        kind = lavapipe if self.physical.is_lavapipe else opaque
        info = vk.VkMemoryGetFdInfoKHR(
            memory=typed_handle("VkDeviceMemory", memory),
            handleType=vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT,
        )
        name = "vkGetMemoryFdKHR"
        function = device_function(self.logical_device, name, "VK_KHR_external_memory_fd")
        number = call(name, self.logical_device, info, function=function)
        return MemoryDescriptor(
            owned_descriptor(number, kind, "the memory"),
            kind,
            allocation_size,
            offset,
            dedicated=dedicated,
            device_uuid=self.device.uuid,
        )

    def image_layout(
        self,
        image: Any,
        tiling: int,
        *,
        aspect: int | None = None,
        mip_level: int = 0,
        array_layer: int = 0,
    ) -> ImageLayout:
        """Tell where the texels of a linear image lie, for `ExternalMemory.tensor`.

        Parameters
        ----------
        image : VkImage
        tiling : int
            What it was created with: Vulkan has no query for it.
        aspect : int, optional
            ``VkImageAspectFlagBits``; None: colour.
        mip_level, array_layer : int

        Raises
        ------
        InvalidDescriptorError
            `tiling` is not ``VK_IMAGE_TILING_LINEAR``.
        """
        vk = library()
        if tiling != vk.VK_IMAGE_TILING_LINEAR:
            raise InvalidDescriptorError(
                f"invalid tiling = {tiling}: expected VK_IMAGE_TILING_LINEAR (1); only the driver "
                "knows where the texels of another lie, so copy the image into a buffer"
            )
        part = vk.VkImageSubresource(
            aspectMask=vk.VK_IMAGE_ASPECT_COLOR_BIT if aspect is None else aspect,
            mipLevel=mip_level,
            arrayLayer=array_layer,
        )
        handle = typed_handle("VkImage", image)
        at = call("vkGetImageSubresourceLayout", self.logical_device, handle, part)
        return ImageLayout(at.offset, at.size, at.rowPitch, at.arrayPitch, at.depthPitch)


class VulkanBuffer(Child[BufferDevice]):
    """A buffer of Vulkan with memory of its own; made by a `VulkanDevice`.

    Attributes
    ----------
    handle : VkBuffer
    memory : VkDeviceMemory
        All of it is the buffer's.
    nbytes : int
        Bytes of the buffer.
    allocation_size : int
        Bytes of the memory: the size that an importer needs.
    dedicated : bool
        Whether the memory was allocated for this buffer alone, as some drivers require.
    """

    def __init__(
        self,
        device: BufferDevice,
        handle: Any,
        memory: Any,
        nbytes: int,
        allocation_size: int,
        dedicated: bool,
        owner: Any = None,
    ) -> None:
        self.handle, self.memory = handle, memory
        self.nbytes, self.allocation_size, self.dedicated = nbytes, allocation_size, dedicated
        self._of_host = owner is not None
        logical = device.logical_device
        self._live_on(device, lambda: _free(logical, handle, memory, owner))

    def descriptor(self) -> MemoryDescriptor:
        """Export its memory: a descriptor of its own at each call, owned by the result's handle.

        Imported with ``consume=True`` it is closed there; else when the result is dropped. The
        memory lives on while it is imported, also after this buffer is closed.

        Raises
        ------
        UnsupportedHandleTypeError
            It is the host's memory, which needs no descriptor.
        DriverError
            The driver refused.
        """
        device = self._open()
        if self._of_host:
            raise UnsupportedHandleTypeError(
                "this buffer is made of the host's memory: import that as a HOST_ALLOCATION"
            )
        return device.export_memory(self.memory, self.allocation_size, dedicated=self.dedicated)

    def require_range(self, offset: int, nbytes: int, what: str) -> None:
        """Raise for a range that Vulkan's copies and fills would go wrong with."""
        self._open()
        for name, value in (("offset", offset), ("nbytes", nbytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidDescriptorError(f"{what}: {name} {value!r} is not a number of bytes")
        if offset + nbytes > self.nbytes:
            raise OutOfBoundsError(
                f"{what}: {exact_size(nbytes)} from offset {offset} on reach beyond a buffer of "
                f"{exact_size(self.nbytes)}",
                size=self.nbytes,
                memory_offset=0,
                tensor_offset=offset,
                extent=nbytes,
            )

    def __repr__(self) -> str:
        state = ", closed" if self._logical is None else ""
        return f"<gpumem.interop.vulkan.VulkanBuffer of {format_size(self.nbytes)}{state}>"


def _free(logical: Any, handle: Any, memory: Any, owner: Any) -> None:
    """Destroy a buffer, then its memory; Vulkan keeps no host memory, so `owner` is kept here."""
    call("vkDestroyBuffer", logical, handle, None)
    call("vkFreeMemory", logical, memory, None)


# ---- steps of making a buffer --------------------------------------------------------------------


def _require_pages(address: int, nbytes: int, alignment: int) -> None:
    """Raise for what a driver with hardware would reject, and lavapipe takes."""
    for name, value in (("address", address), ("size", nbytes)):
        if value % alignment:
            raise AlignmentError(
                f"{name} {value} of the host's memory is not a multiple of {alignment} bytes"
            )


def _make_buffer(
    device: LogicalDevice, undo: ExitStack, nbytes: int, usage: int, handle_type: int
) -> Any:
    vk = library()
    external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=handle_type)
    info = vk.VkBufferCreateInfo(
        pNext=external, size=nbytes, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE
    )
    handle = call("vkCreateBuffer", device.logical_device, info, None)
    undo.callback(call, "vkDestroyBuffer", device.logical_device, handle, None)
    return handle


def _make_memory(
    device: LogicalDevice, undo: ExitStack, buffer: Any, more: Any, nbytes: int, kind: int
) -> Any:
    """Allocate memory and bind the buffer to it."""
    info = library().VkMemoryAllocateInfo(pNext=more, allocationSize=nbytes, memoryTypeIndex=kind)
    memory = call("vkAllocateMemory", device.logical_device, info, None)
    undo.callback(call, "vkFreeMemory", device.logical_device, memory, None)
    call("vkBindBufferMemory", device.logical_device, buffer, memory, 0)
    return memory


def _usage(nbytes: int, usage: int | None) -> int:
    vk = library()
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes < 1 << 63:
        raise InvalidDescriptorError(f"nbytes {nbytes!r} is not an integer from 1 to 2**63 - 1")
    copies = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    return int(copies | (vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT if usage is None else usage))


def _requirements(device: LogicalDevice, buffer: Any) -> tuple[int, int, bool]:
    """Return a buffer's bytes of memory, its memory types, and whether the memory is its alone."""
    vk = library()
    alone = vk.VkMemoryDedicatedRequirements()
    needs = vk.VkMemoryRequirements2(pNext=alone)
    info = vk.VkBufferMemoryRequirementsInfo2(buffer=buffer)
    call("vkGetBufferMemoryRequirements2", device.logical_device, info, needs)
    memory = needs.memoryRequirements
    dedicated = alone.requiresDedicatedAllocation or alone.prefersDedicatedAllocation
    return int(memory.size), int(memory.memoryTypeBits), bool(dedicated)


def _memory_type(device: LogicalDevice, allowed: int, preferred: int) -> int:
    """Return the first allowed memory type with the preferred properties, else the first."""
    types = call("vkGetPhysicalDeviceMemoryProperties", device.physical_device)
    numbers = [each for each in range(types.memoryTypeCount) if allowed >> each & 1]
    if not numbers:
        raise ConfigError(f"the Vulkan device has no memory type among {allowed:#b} for a buffer")
    for each in numbers:
        if types.memoryTypes[each].propertyFlags & preferred == preferred:
            return each
    return numbers[0]

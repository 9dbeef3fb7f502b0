"""Vulkan's buffers: exported to gpumem, or made of the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from gpumem.errors import (
    AlignmentError,
    ConfigError,
    InvalidDescriptorError,
    OutOfBoundsError,
    UnsupportedHandleTypeError,
)
from gpumem.interop.descriptors import MemoryDescriptor, MemoryHandleType
from gpumem.interop.vulkan.calls import call, device_function, library, owned_descriptor
from gpumem.interop.vulkan.children import Child
from gpumem.interop.vulkan.logical import LogicalDevice

__all__ = [
    "ImageLayout",
    "VulkanBuffer",
    "export_memory",
    "exportable_buffer",
    "host_buffer",
    "image_layout",
]


class VulkanBuffer(Child):
    """A buffer of Vulkan with memory of its own; made by a `VulkanDevice`.

    Attributes
    ----------
    handle : VkBuffer
    memory : VkDeviceMemory
        All of it is the buffer's.
    nbytes : int
        Bytes of the buffer.
    allocation_size : int
        Bytes of the memory, which is what an importer has to be told.
    dedicated : bool
        Whether the memory was allocated for this buffer alone, as some drivers require.
    """

    def __init__(
        self,
        logical: LogicalDevice,
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
        device = logical.logical_device
        self._live_on(logical, lambda: _free(device, handle, memory, owner))

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
        logical = self._open()
        if self._of_host:
            raise UnsupportedHandleTypeError(
                "this buffer is made of the host's memory: import that as a HOST_ALLOCATION"
            )
        return export_memory(logical, self.memory, self.allocation_size, dedicated=self.dedicated)

    def require_range(self, offset: int, nbytes: int, what: str) -> None:
        """Raise for a range that Vulkan's copies and fills would go wrong with."""
        self._open()
        for name, value in (("offset", offset), ("nbytes", nbytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidDescriptorError(f"{what}: {name} {value!r} is not a number of bytes")
        if offset + nbytes > self.nbytes:
            raise OutOfBoundsError(
                f"{what}: offset {offset} and {nbytes} bytes reach beyond a buffer of "
                f"{self.nbytes}",
                size=self.nbytes,
                memory_offset=0,
                tensor_offset=offset,
                extent=nbytes,
            )

    def __repr__(self) -> str:
        state = ", closed" if self._logical is None else ""
        return f"<gpumem.interop.vulkan.VulkanBuffer of {self.nbytes} bytes{state}>"


def _free(device: Any, handle: Any, memory: Any, owner: Any) -> None:
    """Destroy a buffer, then its memory; Vulkan keeps no host memory, so `owner` is kept here."""
    call("vkDestroyBuffer", device, handle, None)
    call("vkFreeMemory", device, memory, None)


# ---- exports -------------------------------------------------------------------------------------


def exportable_buffer(logical: LogicalDevice, nbytes: int, usage: int | None) -> VulkanBuffer:
    """Make a buffer whose memory can be exported; see `VulkanDevice.allocate`."""
    vk = library()
    opaque = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
    wanted = _usage(nbytes, usage)
    features = _external_features(logical, opaque, wanted)
    if not features & vk.VK_EXTERNAL_MEMORY_FEATURE_EXPORTABLE_BIT:
        raise UnsupportedHandleTypeError(
            f"{logical.physical.name} exports no buffer of usage {wanted:#x} as a descriptor"
        )
    with _Making(logical) as making:
        handle = making.buffer(nbytes, wanted, opaque)
        needs, dedicated = _requirements(logical, handle)
        dedicated |= bool(features & vk.VK_EXTERNAL_MEMORY_FEATURE_DEDICATED_ONLY_BIT)
        owner = vk.VkMemoryDedicatedAllocateInfo(buffer=handle) if dedicated else None
        export = vk.VkExportMemoryAllocateInfo(pNext=owner, handleTypes=opaque)
        kind = _memory_type(logical, needs.type_bits, vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)
        memory = making.memory(export, needs.size, kind)
        return VulkanBuffer(logical, handle, memory, nbytes, needs.size, dedicated)


def export_memory(
    logical: LogicalDevice,
    memory: Any,
    allocation_size: int,
    *,
    offset: int = 0,
    dedicated: bool = False,
) -> MemoryDescriptor:
    """Return a descriptor of a VkDeviceMemory; see `VulkanDevice.export_memory`."""
    vk = library()
    kind = (
        MemoryHandleType.LAVAPIPE_OPAQUE_FD
        if logical.physical.is_lavapipe
        else MemoryHandleType.OPAQUE_FD
    )
    asked = vk.VkMemoryGetFdInfoKHR(
        memory=memory, handleType=vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
    )
    function = device_function(
        logical.logical_device, "vkGetMemoryFdKHR", "VK_KHR_external_memory_fd"
    )
    number = call("vkGetMemoryFdKHR", logical.logical_device, asked, function=function)
    return MemoryDescriptor(
        owned_descriptor(number, kind, "the memory"),
        kind,
        allocation_size,
        offset,
        dedicated=dedicated,
        device_uuid=logical.device.uuid,
    )


def _external_features(logical: LogicalDevice, handle_type: int, usage: int) -> int:
    asked = library().VkPhysicalDeviceExternalBufferInfo(usage=usage, handleType=handle_type)
    said = call("vkGetPhysicalDeviceExternalBufferProperties", logical.physical_device, asked)
    return int(said.externalMemoryProperties.externalMemoryFeatures)


# ---- the host's memory ---------------------------------------------------------------------------


def host_buffer(logical: LogicalDevice, memory: Any, usage: int | None) -> VulkanBuffer:
    """Make a buffer of the host's memory; see `VulkanDevice.import_host`."""
    vk = library()
    kind = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
    function = device_function(
        logical.logical_device,
        "vkGetMemoryHostPointerPropertiesEXT",
        "VK_EXT_external_memory_host",
    )
    address, nbytes, view = _writable_bytes(memory)
    _require_pages(address, nbytes, pointer_alignment(logical))
    pointer = vk.ffi.cast("void *", address)
    said = call(
        "vkGetMemoryHostPointerPropertiesEXT",
        logical.logical_device,
        kind,
        pointer,
        function=function,
    )
    with _Making(logical) as making:
        handle = making.buffer(nbytes, _usage(nbytes, usage), kind)
        needs, _ = _requirements(logical, handle)
        if needs.size > nbytes:
            raise InvalidDescriptorError(
                f"a Vulkan buffer of {nbytes} bytes needs {needs.size} bytes of memory here"
            )
        chosen = _memory_type(logical, needs.type_bits & said.memoryTypeBits, 0)
        given = vk.VkImportMemoryHostPointerInfoEXT(handleType=kind, pHostPointer=pointer)
        allocated = making.memory(given, nbytes, chosen)
        return VulkanBuffer(logical, handle, allocated, nbytes, nbytes, False, owner=view)


def pointer_alignment(logical: LogicalDevice) -> int:
    """Return what addresses and sizes of the host's memory have to be multiples of."""
    vk = library()
    limits = vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
    call(
        "vkGetPhysicalDeviceProperties2",
        logical.physical_device,
        vk.VkPhysicalDeviceProperties2(pNext=limits),
    )
    return int(limits.minImportedHostPointerAlignment) or 4096


def _writable_bytes(memory: Any) -> tuple[int, int, memoryview]:
    """Return address and size of an object's bytes, and the view that keeps them there."""
    from numpy import frombuffer

    try:
        view = memoryview(memory)
    except TypeError:
        raise InvalidDescriptorError(f"{memory!r} has no buffer") from None
    if view.readonly:
        raise InvalidDescriptorError("the memory is read-only: Vulkan could write it")
    if not view.c_contiguous or not view.nbytes:
        raise InvalidDescriptorError("the memory's bytes are not contiguous, or there are none")
    return frombuffer(view.cast("B"), "uint8").ctypes.data, view.nbytes, view


def _require_pages(address: int, nbytes: int, alignment: int) -> None:
    """Raise for what a driver with hardware would reject, and lavapipe takes."""
    for name, value in (("address", address), ("size", nbytes)):
        if value % alignment:
            raise AlignmentError(
                f"{name} {value} of the host's memory is not a multiple of {alignment} bytes"
            )


# ---- images --------------------------------------------------------------------------------------


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


def image_layout(
    logical: LogicalDevice, image: Any, tiling: int, aspect: int | None, mip: int, layer: int
) -> ImageLayout:
    """Ask where a linear image's texels lie; see `VulkanDevice.image_layout`."""
    vk = library()
    if tiling != vk.VK_IMAGE_TILING_LINEAR:
        raise InvalidDescriptorError(
            f"tiling {tiling} is not VK_IMAGE_TILING_LINEAR (1): only the driver knows where the "
            "texels of another lie; copy the image into a buffer"
        )
    part = vk.VkImageSubresource(
        aspectMask=vk.VK_IMAGE_ASPECT_COLOR_BIT if aspect is None else aspect,
        mipLevel=mip,
        arrayLayer=layer,
    )
    said = call("vkGetImageSubresourceLayout", logical.logical_device, image, part)
    return ImageLayout(said.offset, said.size, said.rowPitch, said.arrayPitch, said.depthPitch)


# ---- what they share -----------------------------------------------------------------------------


class _Making:
    """Makes a buffer and its memory; destroys what there is of them if a step fails."""

    def __init__(self, logical: LogicalDevice) -> None:
        self.logical = logical
        self.made: list[tuple[str, Any]] = []

    def buffer(self, nbytes: int, usage: int, handle_type: int) -> Any:
        vk = library()
        external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=handle_type)
        asked = vk.VkBufferCreateInfo(
            pNext=external, size=nbytes, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE
        )
        handle = call("vkCreateBuffer", self.logical.logical_device, asked, None)
        self.made.append(("vkDestroyBuffer", handle))
        return handle

    def memory(self, more: Any, nbytes: int, kind: int) -> Any:
        """Allocate memory and bind the buffer to it."""
        device = self.logical.logical_device
        asked = library().VkMemoryAllocateInfo(
            pNext=more, allocationSize=nbytes, memoryTypeIndex=kind
        )
        memory = call("vkAllocateMemory", device, asked, None)
        self.made.append(("vkFreeMemory", memory))
        call("vkBindBufferMemory", device, self.made[0][1], memory, 0)
        return memory

    def __enter__(self) -> Self:
        self.logical.adopt_child()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            return
        for name, handle in self.made:
            call(name, self.logical.logical_device, handle, None)
        self.logical.retire_child(lambda: None)


def _usage(nbytes: int, usage: int | None) -> int:
    vk = library()
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes < 1 << 63:
        raise InvalidDescriptorError(f"nbytes {nbytes!r} is not an integer from 1 to 2**63 - 1")
    copies = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    return int(copies | (vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT if usage is None else usage))


def _requirements(logical: LogicalDevice, buffer: Any) -> tuple[_Needs, bool]:
    """Return a buffer's memory requirements and whether the memory has to be its alone."""
    vk = library()
    alone = vk.VkMemoryDedicatedRequirements()
    asked = vk.VkMemoryRequirements2(pNext=alone)
    info = vk.VkBufferMemoryRequirementsInfo2(buffer=buffer)
    call("vkGetBufferMemoryRequirements2", logical.logical_device, info, asked)
    needs = asked.memoryRequirements
    dedicated = alone.requiresDedicatedAllocation or alone.prefersDedicatedAllocation
    return _Needs(int(needs.size), int(needs.memoryTypeBits)), bool(dedicated)


@dataclass(frozen=True)
class _Needs:
    size: int
    type_bits: int


def _memory_type(logical: LogicalDevice, allowed: int, preferred: int) -> int:
    """Return the first allowed memory type with the preferred properties, else the first."""
    types = call("vkGetPhysicalDeviceMemoryProperties", logical.physical_device)
    numbers = [each for each in range(types.memoryTypeCount) if allowed >> each & 1]
    if not numbers:
        raise ConfigError(f"the Vulkan device has no memory type among {allowed:#b} for a buffer")
    for each in numbers:
        if types.memoryTypes[each].propertyFlags & preferred == preferred:
            return each
    return numbers[0]

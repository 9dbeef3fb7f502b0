"""Each kind of memory handle that Linux has: whether a device can import it, and how.

A row of `KINDS` has both. Reading a capability never raises; importing raises its reason.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumem._resource.handle import Handle
from gpumem._resource.pool import DriverPool
from gpumem._support.sizes import exact_size
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import (
    BadHandleError,
    InvalidDescriptorError,
    UnsupportedHandleTypeError,
)
from gpumem.interop.descriptors import (
    NOT_ON_LINUX,
    WINDOWS_TYPES,
    InteropCapability,
    MemoryDescriptor,
    MemoryHandleType,
    bytes_of,
    duplicate,
    keep_from_shrinking,
    require_consumable,
    require_device,
)
from gpumem.interop.descriptors import consume as consume_handle
from gpumem.interop.memory import _external_memory as external
from gpumem.interop.memory._external_memory import ExternalMemory, release_retired

_OPAQUE_FD, _DMABUF_FD = 1, 9  # CUexternalMemoryHandleType
_INTEGRATED = "CU_DEVICE_ATTRIBUTE_INTEGRATED"
_SAME_HOST_POINTER = "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"
_POOL_HANDLE_TYPES = "CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES"
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, a bit of that attribute

# The head of a file of Mesa's software Vulkan: its size, where the bytes begin, and a mark.
_LAVAPIPE_HEADER = struct.Struct("<QQ16s")
_LAVAPIPE_MARK = bytes.fromhex("6cb9ee074a0bad7b012e1be9697e530f")
_PAGE = 4096
# _IOW('b', 0, struct dma_buf_sync), and its flags: begin and end of reading
_DMA_BUF_SYNC, _SYNC_BEGIN_READ, _SYNC_END_READ = 0x40086200, 1, 5


@dataclass(frozen=True)
class Wanted:
    """One import: its descriptor, and the device and memory that it becomes here."""

    descriptor: MemoryDescriptor
    device: Device
    memory: MemoryInfo
    dedicated: bool


@dataclass(frozen=True)
class Kind:
    """The capability of one kind of handle, and the function that imports it."""

    capability: Callable[[Device], InteropCapability]
    open: Callable[[Wanted], ExternalMemory]
    host_pages: bool = False


def memory_capability(device: Device, handle_type: MemoryHandleType) -> InteropCapability:
    """Return whether the device imports memory by this kind of handle. Never raises for one."""
    if not isinstance(handle_type, MemoryHandleType):
        raise TypeError(f"handle_type must be a MemoryHandleType, not {handle_type!r}")
    if handle_type in WINDOWS_TYPES:
        return _no(NOT_ON_LINUX)
    try:
        return KINDS[handle_type].capability(device)
    except Exception as error:
        return _no(str(error))


def import_memory(
    device: Device, descriptor: MemoryDescriptor, *, consume: bool = False
) -> ExternalMemory:
    """Map memory from outside; see `Importer.import_memory`."""
    if not isinstance(descriptor, MemoryDescriptor):
        raise TypeError(f"import_memory takes a MemoryDescriptor, not {descriptor!r}")
    require_consumable(
        descriptor.handle,
        consume,
        is_address=descriptor.handle_type is MemoryHandleType.HOST_ALLOCATION,
    )
    capability = memory_capability(device, descriptor.handle_type)
    if not capability:
        raise UnsupportedHandleTypeError(
            f"{device} cannot import {descriptor.handle_type.name}: {capability.reason}"
        )
    kind = KINDS[descriptor.handle_type]
    _check_against(descriptor, capability, device)
    release_retired()
    memory = MemoryInfo.parse(device)
    if kind.host_pages and device.type == "cuda":
        memory = MemoryInfo(device, MemoryKind.HOST_ACCESSIBLE)
    made = kind.open(Wanted(descriptor, device, memory, bool(descriptor.dedicated)))
    if consume:
        consume_handle(descriptor.handle)
    return made


def _check_against(
    descriptor: MemoryDescriptor, capability: InteropCapability, device: Device
) -> None:
    name = descriptor.handle_type.name
    if descriptor.dedicated and capability.dedicated == "forbidden":
        raise InvalidDescriptorError(f"invalid dedicated = True with {name}: expected False")
    if descriptor.offset % capability.offset_alignment:
        raise InvalidDescriptorError(
            f"offset {descriptor.offset} of {name} is not a multiple of "
            f"{capability.offset_alignment}"
        )
    require_device(descriptor, device)


# ---- capabilities --------------------------------------------------------------------------------


def _no(reason: str) -> InteropCapability:
    return InteropCapability(False, reason)


def _by(feature: str, **details: Any) -> Callable[[Device], InteropCapability]:
    """Return an answer that depends on one of the device's capabilities."""

    def answer(device: Device) -> InteropCapability:
        able = device.capabilities[feature]
        return InteropCapability(able.supported, able.reason, **details)

    return answer


def _lavapipe(device: Device) -> InteropCapability:
    if device.type != "host":
        return _no("its memory is the CPU's: import it on a host device")
    return _by("external_memory", dedicated="as_exporter")(device)


def _dmabuf(device: Device) -> InteropCapability:
    if device.type == "host":
        return InteropCapability(True)
    if not device._open().named_attribute(_INTEGRATED):
        return _no("CUDA imports dma-bufs on integrated devices (Tegra from Thor on) only")
    return _by("external_memory")(device)


def _host_pages(device: Device) -> InteropCapability:
    if device.type == "cuda" and not device._open().named_attribute(_SAME_HOST_POINTER):
        return _no("the device sees registered host memory at another address than the CPU")
    return _by("host_register")(device)


def _pool(device: Device) -> InteropCapability:
    able = device.capabilities["memory_pools"]
    if able and not device._open().named_attribute(_POOL_HANDLE_TYPES) & _POSIX_FD:
        return _no("the device's pools cannot be shared by descriptor")
    return InteropCapability(able.supported, able.reason)


# ---- imports -------------------------------------------------------------------------------------


def _by_file(
    open_file: Callable[[Wanted, Handle], ExternalMemory],
) -> Callable[[Wanted], ExternalMemory]:
    """Import by a duplicate of the caller's descriptor."""

    def opened(wanted: Wanted) -> ExternalMemory:
        with duplicate(wanted.descriptor.handle) as file:
            keep_from_shrinking(file)
            return open_file(wanted, file)

    return opened


def _open_opaque(wanted: Wanted, file: Handle) -> ExternalMemory:
    if wanted.device.type == "host" and _header(file) is not None:
        return _open_lavapipe(wanted, file)
    return external.import_external(wanted, _OPAQUE_FD, file)


def _open_lavapipe(wanted: Wanted, file: Handle) -> ExternalMemory:
    header = _header(file)
    if header is None:
        raise BadHandleError(errno.EINVAL, "the descriptor's file is not one of lavapipe's memory")
    size, start = header
    external.require_bytes(file, size)
    if start % _PAGE or start + wanted.descriptor.size > size:
        raise BadHandleError(
            errno.EINVAL,
            f"lavapipe's file of {exact_size(size)}, with memory from offset {start} on, has "
            f"fewer bytes than described, {exact_size(wanted.descriptor.size)}",
        )
    return external.import_external(wanted, _OPAQUE_FD, file, start)


def _header(file: Handle) -> tuple[int, int] | None:
    """Read (bytes of the file, where the memory begins); None: it is not a file of lavapipe's."""
    try:
        head = os.pread(file.fileno(), _LAVAPIPE_HEADER.size, 0)
    except OSError:
        return None
    if len(head) < _LAVAPIPE_HEADER.size:
        return None
    size, start, mark = _LAVAPIPE_HEADER.unpack(head)
    return (size, start) if mark == _LAVAPIPE_MARK else None


def _open_dmabuf(wanted: Wanted, file: Handle) -> ExternalMemory:
    try:
        for flag in (_SYNC_BEGIN_READ, _SYNC_END_READ):
            fcntl.ioctl(file.fileno(), _DMA_BUF_SYNC, struct.pack("Q", flag))
    except OSError as error:
        raise BadHandleError(
            error.errno, f"the descriptor is not a dma-buf: {error.strerror}"
        ) from None
    if wanted.device.type == "host":
        return external.import_file(wanted, file)
    return external.import_external(wanted, _DMABUF_FD, file)


def _open_name(wanted: Wanted) -> ExternalMemory:
    name = wanted.descriptor.handle.removeprefix("/")
    if "/" in name or name in (".", ".."):
        raise InvalidDescriptorError(f"{name!r} is not a name of a shared memory object")
    access = os.O_RDONLY if wanted.descriptor.read_only else os.O_RDWR
    try:
        # shm_open does the same, but waits if the name is a pipe's.
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        number = os.open(f"/dev/shm/{name}", flags)
    except OSError as error:
        raise BadHandleError(
            error.errno, f"shared memory object {name!r}: {error.strerror}"
        ) from None
    with Handle._owning(number) as file:
        return external.import_file(wanted, file)


def _open_address(wanted: Wanted) -> ExternalMemory:
    handle, owner = wanted.descriptor.handle, wanted.descriptor.owner
    if isinstance(handle, int):
        return external.import_host(wanted, handle, owner)
    address, nbytes, kept = bytes_of(handle, wanted.descriptor.read_only)
    if nbytes < wanted.descriptor.size:
        raise InvalidDescriptorError(
            f"invalid size = {exact_size(wanted.descriptor.size)}: expected at most the "
            f"{exact_size(nbytes)} of handle"
        )
    return external.import_host(wanted, address, (kept, owner))


def _open_pool(wanted: Wanted, file: Handle) -> ExternalMemory:
    pool = DriverPool.import_handle(wanted.device, file)
    try:
        buffer = pool.import_buffer(wanted.descriptor.pool_pointer)
    except ValueError as error:
        raise InvalidDescriptorError(f"pool_pointer: {error}") from None
    if buffer.nbytes < wanted.descriptor.size:
        raise BadHandleError(
            errno.EINVAL,
            f"the block has {exact_size(buffer.nbytes)}: fewer than described, "
            f"{exact_size(wanted.descriptor.size)}",
        )
    return external.import_buffer(wanted, buffer)


KINDS = {
    MemoryHandleType.OPAQUE_FD: Kind(
        _by("external_memory", dedicated="as_exporter"), _by_file(_open_opaque)
    ),
    MemoryHandleType.HOST_ALLOCATION: Kind(_host_pages, _open_address, host_pages=True),
    MemoryHandleType.DMABUF_FD: Kind(_dmabuf, _by_file(_open_dmabuf)),
    MemoryHandleType.CUDA_VMM_FD: Kind(_by("posix_fd_handles"), _by_file(external.import_physical)),
    MemoryHandleType.CUDA_POOL_FD: Kind(_pool, _by_file(_open_pool)),
    MemoryHandleType.MEMFD: Kind(_host_pages, _by_file(external.import_file), host_pages=True),
    MemoryHandleType.SHM_NAME: Kind(_host_pages, _open_name, host_pages=True),
    MemoryHandleType.LAVAPIPE_OPAQUE_FD: Kind(_lavapipe, _by_file(_open_lavapipe)),
}

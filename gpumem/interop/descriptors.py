"""How a producer describes its memory or timeline: handle types, descriptors, capabilities.

Descriptors are plain values. Every program that has a file descriptor, a name or an address can
fill them.

The driver acquires a file descriptor when an import succeeds, and some drivers also when it fails.
An import therefore passes a duplicate. The caller's own is closed last, and only if `consume` is
True.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from gpumem._resource.handle import Handle
from gpumem._support.arguments import refuse, whole_number
from gpumem._support.sizes import exact_size
from gpumem.device import Capability, Device, uuid_of
from gpumem.errors import BadHandleError, DeviceMismatchError, InvalidDescriptorError

MAX_BYTES = (1 << 63) - 1


class MemoryHandleType(enum.Enum):
    """Kind of handle of a memory. The first five have ONNX Runtime's numbers.

    Examples
    --------
    >>> from gpumem.interop import Importer, MemoryHandleType
    >>> MemoryHandleType(3)              # by ONNX Runtime's number
    <MemoryHandleType.OPAQUE_FD: 3>
    >>> bool(Importer.for_device("host").can_import_memory(MemoryHandleType.SHM_NAME))
    True
    """

    D3D12_RESOURCE = 0
    """NT handle or name of a committed Direct3D 12 resource; always dedicated."""
    D3D12_HEAP = 1
    """NT handle or name of a Direct3D 12 heap."""
    OPAQUE_WIN32 = 2
    """NT handle or name of Vulkan memory."""
    OPAQUE_FD = 3
    """Descriptor of Vulkan memory, of the same device and driver."""
    HOST_ALLOCATION = 4
    """Address of memory of this process, whole pages."""
    DMABUF_FD = 5
    """Descriptor of a Linux dma-buf."""
    CUDA_VMM_FD = 6
    """Descriptor of a physical allocation of CUDA's virtual memory management."""
    CUDA_VMM_WIN32 = 7
    """NT handle of one."""
    CUDA_POOL_FD = 8
    """Descriptor of a driver's pool; `MemoryDescriptor.pool_pointer` identifies the block."""
    MEMFD = 9
    """Descriptor of a file in memory: memfd, an open POSIX shared memory object."""
    SHM_NAME = 10
    """Name of a POSIX shared memory object."""
    LAVAPIPE_OPAQUE_FD = 11
    """Descriptor of memory of Mesa's software Vulkan: a file with a header before the bytes."""


class SemaphoreType(enum.Enum):
    """Kind of handle of a timeline. The first three have ONNX Runtime's numbers.

    Examples
    --------
    >>> from gpumem.interop import HostTimeline, SemaphoreDescriptor, SemaphoreType, Importer
    >>> handle = HostTimeline.create().export()
    >>> importer = Importer.for_device("host")
    >>> importer.import_semaphore(SemaphoreDescriptor(handle, SemaphoreType.HOST_TIMELINE)).value()
    0
    """

    D3D12_FENCE = 0
    """NT handle or name of a Direct3D 12 fence."""
    TIMELINE_WIN32 = 1
    """NT handle or name of a Vulkan timeline semaphore."""
    TIMELINE_OPAQUE_FD = 2
    """Descriptor of a Vulkan timeline semaphore, of the same device and driver."""
    HOST_TIMELINE = 3
    """Descriptor of the page of a `HostTimeline`."""


NOT_ON_LINUX = "NT handles exist on Windows, and gpumem runs on Linux"
WINDOWS_TYPES = frozenset(
    {
        MemoryHandleType.D3D12_RESOURCE,
        MemoryHandleType.D3D12_HEAP,
        MemoryHandleType.OPAQUE_WIN32,
        MemoryHandleType.CUDA_VMM_WIN32,
        SemaphoreType.D3D12_FENCE,
        SemaphoreType.TIMELINE_WIN32,
    }
)
NAMED_TYPES = frozenset(WINDOWS_TYPES - {MemoryHandleType.CUDA_VMM_WIN32}) | {
    MemoryHandleType.SHM_NAME
}


@dataclass(frozen=True)
class InteropCapability(Capability):
    """Whether a kind of handle can be imported, and why not; true if it can.

    Attributes
    ----------
    supported : bool
    reason : str
        Why it is not supported; empty if it is.
    dedicated : str
        Which `MemoryDescriptor.dedicated` is valid: ``"forbidden"`` (False), or
        ``"as_exporter"``, the value that the exporter allocated it with.
    offset_alignment : int
        `MemoryDescriptor.offset` must be a multiple of it, in bytes.

    Examples
    --------
    >>> from gpumem.interop import MemoryHandleType, Importer
    >>> answer = Importer.for_device("host").can_import_memory(MemoryHandleType.MEMFD)
    >>> bool(answer), answer.dedicated
    (True, 'forbidden')
    """

    dedicated: Literal["forbidden", "as_exporter"] = "forbidden"
    offset_alignment: int = 1


@dataclass(frozen=True)
class MemoryDescriptor:
    """Memory that another API or process allocated.

    Attributes
    ----------
    handle : int, str or object
        By `handle_type`: a file descriptor or an object with ``fileno()``; an NT handle; a name; an
        address or an object with a writable buffer (read-only if `read_only`).
    handle_type : MemoryHandleType
    size : int
        Bytes of the whole allocation, as its exporter made it: of a Vulkan buffer its
        ``allocationSize``, not the buffer's size.
    offset : int
        Bytes of the allocation before the described memory, such as the memory offset of a Vulkan
        buffer.
    dedicated : bool, optional
        Whether the exporter allocated it for one resource alone. None: False.
    read_only : bool
        Whether this process may only read it.
    device_uuid : str, bytes or UUID, optional
        Identity of the device that it lies on; importing it on another device is an error. Stored
        as 32 hexadecimal digits.
    owner : object, optional
        For a HOST_ALLOCATION: the object that keeps the memory alive, referenced until the last
        view is gone. For an address without an owner the caller must keep the memory alive.
    pool_pointer : bytes, optional
        For a CUDA_POOL_FD: the bytes that `DriverPool.export_buffer` returned.

    Raises
    ------
    TypeError
        `handle_type` is not a MemoryHandleType.
    InvalidDescriptorError
        Another value is invalid; the message names it and the valid ones.

    Examples
    --------
    >>> import os
    >>> from gpumem.interop import MemoryDescriptor, MemoryHandleType
    >>> fd = os.memfd_create("pixels")
    >>> os.truncate(fd, 4096)
    >>> MemoryDescriptor(fd, MemoryHandleType.MEMFD, 4096, offset=256).nbytes
    3840
    >>> os.close(fd)
    """

    handle: Any
    handle_type: MemoryHandleType
    size: int
    offset: int = 0
    dedicated: bool | None = None
    read_only: bool = False
    device_uuid: str | bytes | UUID | None = None
    owner: Any = field(default=None, repr=False, compare=False)
    pool_pointer: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.handle_type, MemoryHandleType):
            raise TypeError(f"handle_type must be a MemoryHandleType, not {self.handle_type!r}")
        size = number_of(self.size, "size", 1)
        offset = number_of(self.offset, "offset")
        if offset > size:
            raise InvalidDescriptorError(
                f"offset {offset} is above the allocation's {exact_size(size)}"
            )
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "device_uuid", _uuid(self.device_uuid))
        _check_handle(self.handle, self.handle_type)
        _check_flags(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the described memory: of the allocation from `offset` on."""
        return self.size - self.offset


@dataclass(frozen=True)
class SemaphoreDescriptor:
    """A timeline that another API or process made.

    Attributes
    ----------
    handle : int, str or object
        By `type`: a file descriptor or an object with ``fileno()``; an NT handle; a name.
    type : SemaphoreType
    device_uuid : str, bytes or UUID, optional
        Identity of the device that it belongs to; importing it on another device is an error.

    Raises
    ------
    TypeError
        `type` is not a SemaphoreType.
    InvalidDescriptorError
        Another value is invalid.

    Examples
    --------
    >>> from gpumem.interop import HostTimeline, SemaphoreDescriptor, SemaphoreType, Importer
    >>> timeline = HostTimeline.create()
    >>> descriptor = SemaphoreDescriptor(timeline.export(), SemaphoreType.HOST_TIMELINE)
    >>> there = Importer.for_device("host").import_semaphore(descriptor)
    >>> timeline.signal(3)
    >>> there.value()
    3
    """

    handle: Any
    type: SemaphoreType
    device_uuid: str | bytes | UUID | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.type, SemaphoreType):
            raise TypeError(f"type must be a SemaphoreType, not {self.type!r}")
        object.__setattr__(self, "device_uuid", _uuid(self.device_uuid))
        _check_handle(self.handle, self.type)


def number_of(value: object, name: str, lowest: int = 0) -> int:
    """Return a number of bytes or elements as an integer."""
    number = whole_number(value)
    if number is None or not lowest <= number <= MAX_BYTES:
        raise InvalidDescriptorError(
            f"{name} {value!r} is not an integer from {lowest} to 2**63 - 1"
        )
    return number


def seconds_of(timeout: Any) -> float:
    """Return a timeout as a number; TypeError, or ValueError for one that is not from 0 on."""
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__"):
        refuse("timeout", timeout, "a number of seconds or None")
    seconds = float(timeout)
    if not seconds >= 0:
        raise ValueError(f"invalid timeout = {timeout!r}: expected a number of seconds from 0 on")
    return seconds


def _check_handle(handle: object, kind: MemoryHandleType | SemaphoreType) -> None:
    if isinstance(handle, bool) or handle is None:
        raise InvalidDescriptorError(f"handle {handle!r} is not a handle of a {kind.name}")
    if isinstance(handle, str):
        if kind not in NAMED_TYPES:
            raise InvalidDescriptorError(f"a {kind.name} has no name: handle is {handle!r}")
        if not handle or "\0" in handle:
            raise InvalidDescriptorError(f"handle {handle!r} is not a name")
    elif kind is MemoryHandleType.SHM_NAME:
        raise InvalidDescriptorError(f"a SHM_NAME is a text, not {handle!r}")
    elif isinstance(handle, int):
        limit = 1 << (31 if _is_file(kind) else 64)
        lowest = 0 if _is_file(kind) else 1
        if not lowest <= handle < limit:
            raise InvalidDescriptorError(
                f"handle {handle} of a {kind.name} is not from {lowest} to {limit - 1}"
            )
    elif kind is not MemoryHandleType.HOST_ALLOCATION and not hasattr(handle, "fileno"):
        raise InvalidDescriptorError(
            f"handle {handle!r} of a {kind.name} is neither an integer nor has it fileno()"
        )


def _is_file(kind: MemoryHandleType | SemaphoreType) -> bool:
    return kind not in WINDOWS_TYPES and kind is not MemoryHandleType.HOST_ALLOCATION


def _check_flags(memory: MemoryDescriptor) -> None:
    for name, value, accepted in (
        ("read_only", memory.read_only, (True, False)),
        ("dedicated", memory.dedicated, (True, False, None)),
    ):
        if not any(value is each for each in accepted):
            raise InvalidDescriptorError(f"{name} {value!r} is not one of {accepted}")
    if (memory.pool_pointer is None) is (memory.handle_type is MemoryHandleType.CUDA_POOL_FD):
        raise InvalidDescriptorError(
            "pool_pointer goes with a CUDA_POOL_FD, and a CUDA_POOL_FD with pool_pointer: "
            f"handle_type is {memory.handle_type.name}, pool_pointer {memory.pool_pointer!r}"
        )
    if memory.owner is not None and memory.handle_type is not MemoryHandleType.HOST_ALLOCATION:
        raise InvalidDescriptorError(
            f"owner goes with a HOST_ALLOCATION, not with a {memory.handle_type.name}"
        )


def _uuid(value: object) -> str | None:
    """Return an identity as 32 hexadecimal digits."""
    try:
        if value is None:
            return None
        if isinstance(value, str) and (uuid := uuid_of(value)) is not None:
            return uuid
        if isinstance(value, UUID):
            return value.hex
        if isinstance(value, bytes | bytearray | memoryview):
            return UUID(bytes=bytes(value)).hex
    except ValueError:
        pass
    raise InvalidDescriptorError(f"device_uuid {value!r} is not 16 bytes or 32 hexadecimal digits")


def require_device(descriptor: MemoryDescriptor | SemaphoreDescriptor, device: Device) -> None:
    """Raise DeviceMismatchError for a descriptor that names another device."""
    if descriptor.device_uuid not in (None, device.uuid):
        raise DeviceMismatchError(
            f"the descriptor is of device {descriptor.device_uuid!r}, and {device} is "
            f"{device.uuid!r}"
        )


# ---- handles, and objects with bytes -------------------------------------------------------------


def duplicate(handle: Any) -> Handle:
    """Return a new descriptor of the same file as `handle`; close-on-exec.

    Raises
    ------
    BadHandleError
        The handle is not open, or the process has too many open files.
    """
    number = handle if isinstance(handle, int) else handle.fileno()
    if not 0 <= number < 1 << 31:
        raise BadHandleError(errno.EBADF, f"descriptor {number} is not from 0 to 2**31 - 1")
    try:
        return Handle._owning(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0))
    except OSError as error:
        raise BadHandleError(error.errno, f"descriptor {number}: {error.strerror}") from None


def keep_from_shrinking(file: Handle) -> None:
    """Seal a file in memory, because an access of mapped bytes that were cut off is fatal.

    A file that its maker has not allowed to be sealed, or that is opened to read, stays as it is.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def require_consumable(handle: Any, consume: bool, *, is_address: bool = False) -> None:
    """Raise InvalidDescriptorError for a handle that cannot be taken over: a name, an address."""
    if not isinstance(consume, bool):
        raise TypeError(f"consume {consume!r} is not True or False")
    is_closable = hasattr(handle, "fileno") and hasattr(handle, "close")
    if consume and (is_address or not (isinstance(handle, int) or is_closable)):
        raise InvalidDescriptorError(
            f"invalid consume = True with {handle!r}: only a descriptor can be consumed"
        )


def consume(handle: Any) -> None:
    """Close the caller's handle, after everything succeeded."""
    if isinstance(handle, int):
        os.close(handle)
    else:
        handle.close()


def bytes_of(handle: Any, read_only: bool) -> tuple[int, int, memoryview]:
    """Return the address and size of an object's bytes, and the view that keeps them there."""
    from numpy import frombuffer

    try:
        view = memoryview(handle)
    except TypeError:
        raise InvalidDescriptorError(f"handle {handle!r} has no buffer") from None
    if view.readonly and not read_only:
        raise InvalidDescriptorError(
            "handle is read-only: expected a writable buffer or read_only = True"
        )
    if not view.c_contiguous:
        raise InvalidDescriptorError("the bytes of handle are not contiguous")
    array = frombuffer(view.cast("B") if view.nbytes else b"", "uint8")
    return array.ctypes.data, view.nbytes, view

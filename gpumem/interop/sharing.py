"""Memory for other processes: `export` returns a handle, and `attach` there returns a tensor.

A Handle can be sent with `multiprocessing` as it is. It carries a description of its memory,
`Contents`, so the processes need no other agreement.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpumem._arena.arena import export_block
from gpumem._buffer.buffer import Buffer
from gpumem._copy.copy import synchronize
from gpumem._resource.handle import Handle
from gpumem._resource.pool import pool_of
from gpumem._support.arguments import require
from gpumem._support.texts import shown
from gpumem._tensor import Tensor, from_dlpack
from gpumem.device import Device, MemoryInfo, MemoryKind, device_of_uuid, devices
from gpumem.errors import (
    AlignmentError,
    BadHandleError,
    DriverError,
    InvalidDescriptorError,
    OutOfBoundsError,
    UnsupportedHandleTypeError,
)
from gpumem.interop.descriptors import (
    MAX_BYTES,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreType,
)
from gpumem.interop.importer import Importer, ImporterLike
from gpumem.interop.memory.placement import require_aligned
from gpumem.interop.timelines._timeline import HostTimeline, Timeline

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Contents:
    """Description of the memory of a handle.

    Attributes
    ----------
    memory : MemoryInfo
        Its memory, as the exporting process names it.
    device_uuid : str or None
        Identity of the device that it lies on; None of host memory, which lies on none.
    size : int
        Bytes of the memory that the handle stands for.
    offset : int
        Bytes before the tensor begins in it.
    shape : tuple of int
    strides : tuple of int
        Bytes.
    dtype : numpy.dtype
    read_only : bool
    pool_pointer : bytes or None
        Identifies the block in a driver's pool.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem import interop
    >>> buffer = gpumem.Arena("host").allocate(4096, shareable=True)
    >>> handle = interop.export(gpumem.from_dlpack(buffer)[1024:])
    >>> handle.contents.size, handle.contents.offset, handle.contents.shape
    (4096, 1024, (3072,))
    """

    memory: MemoryInfo
    device_uuid: str | None
    size: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    read_only: bool
    pool_pointer: bytes | None = None


def export(what: Any, *, read_only: bool = False, sync: bool = True) -> Handle:
    """Return a handle by which another process reaches memory or a timeline.

    Parameters
    ----------
    what : Tensor, Buffer or Timeline
        Memory that an `Arena` allocated with ``shareable=True``, or that a `DriverPool` made with
        ``shareable=True`` allocated; or a timeline.
    read_only : bool
        The receiver of the handle cannot write. For host memory only.
    sync : bool
        Wait until the work that gpumem has queued on the memory's stream is done. False where a
        timeline orders the other process's work after it.

    Returns
    -------
    Handle
        An argument for `attach`. It keeps the memory until it is closed, also without the tensor.

    Raises
    ------
    TypeError
        `what` is neither, or `read_only` not a bool.
    UnsupportedHandleTypeError
        The memory is not shareable, or cannot be exported to be read only.
    InvalidDescriptorError
        Strides are negative, or the dtype has fields.
    AlignmentError
        Elements are not at multiples of their alignment.
    ClosedError
        It is closed.
    DriverError
        The driver refused.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem import interop
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(4096, shareable=True)
    >>> tensor = gpumem.from_dlpack(buffer).view("float32")
    >>> handle = interop.export(tensor)         # send it to another process; there:
    >>> there = interop.attach(handle)
    >>> there.numpy()[:] = 5
    >>> float(tensor.numpy()[0])
    5.0
    """
    require("read_only", read_only, bool, "True or False")
    if isinstance(what, Buffer):
        what = from_dlpack(what)
    if not isinstance(what, Tensor):
        if isinstance(what, Timeline):
            return what.export()
        raise TypeError(f"export takes a Tensor, a Buffer or a Timeline, not {what!r}")
    if what.nbytes == 0:
        raise UnsupportedHandleTypeError("an empty tensor has no memory to export")
    if min(what.strides, default=0) < 0:
        raise InvalidDescriptorError(
            f"strides {what.strides} are negative: export the tensor that it is a view of"
        )
    # `attach` refuses these as signs of a damaged handle, so `export` refuses them first.
    if what.dtype.names is not None:
        raise InvalidDescriptorError(
            f"dtype {what.dtype} has fields: export a view of its bytes, such as "
            f"view('V{what.itemsize}')"
        )
    require_aligned(what.ptr, what.shape, what.strides, what.dtype)
    if sync:
        synchronize(what.buffer)
    return _export_tensor(what, read_only or what.read_only)


def _export_tensor(tensor: Tensor, read_only: bool) -> Handle:
    buffer = tensor.buffer
    memory = buffer.memory
    pool = pool_of(buffer)
    if pool is not None:
        if read_only:
            raise UnsupportedHandleTypeError(
                f"memory of {pool!r} cannot be exported to be read only: the receiver of the "
                "handle may map it to write"
            )
        note = pool.export_buffer(buffer)
        handle, size, start = pool.export_handle(), buffer.nbytes, 0
        kind = MemoryHandleType.CUDA_POOL_FD
    else:
        handle, is_file, size, start = export_block(buffer, read_only)
        kind = MemoryHandleType.MEMFD if is_file else MemoryHandleType.CUDA_VMM_FD
        note = None
    contents = Contents(
        memory=memory,
        device_uuid=memory.device.uuid if memory.kind is MemoryKind.DEVICE else None,
        size=size,
        offset=start + tensor.ptr - buffer.ptr,
        shape=tensor.shape,
        strides=tensor.strides,
        dtype=tensor.dtype,
        read_only=read_only,
        pool_pointer=note,
    )
    handle._describe(kind, contents)
    return handle


def attach(handle: Handle, *, device: Device | str | None = None) -> Any:
    """Return the tensor, or the timeline, that another process exported.

    Parameters
    ----------
    handle : Handle
        Result of `export`, received in this process; the caller keeps it and may close it at once.
    device : Device or str, optional
        Where it is wanted. None: the device that it lies on; host memory on the device of the same
        name, if it exists here, else on ``host:0``.

    Returns
    -------
    Tensor or HostTimeline
        In the same memory. Its views keep the memory, whatever the other process does.

    Raises
    ------
    TypeError
        `handle` is not a Handle.
    DeviceMismatchError
        The device that it lies on is not here, or is not `device`.
    BadHandleError
        The handle is not a result of `export`: its contents are damaged or do not fit the memory,
        or the driver refuses its descriptor; or as `Importer.import_memory`.
    UnsupportedHandleTypeError, DriverError
        As `Importer.import_memory`.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem import interop
    >>> buffer = gpumem.Arena("host").allocate(4096, shareable=True)
    >>> with interop.export(buffer) as handle:           # it goes to the other process; there:
    ...     tensor = interop.attach(handle)
    >>> tensor.numpy()[0] = 7
    >>> memoryview(buffer)[0]
    7
    """
    if not isinstance(handle, Handle):
        raise TypeError(f"attach takes a Handle of exported memory or a timeline, not {handle!r}")
    if handle.kind is SemaphoreType.HOST_TIMELINE:
        return HostTimeline.from_fd(handle, device=device)
    contents = handle.contents
    _require_whole(handle)
    where = _device_of(contents) if device is None else Device(device)
    importer = Importer.for_device(where)
    if importer is None:
        raise UnsupportedHandleTypeError(
            f"{where} does not support importing memory: {Importer.unavailable_reason(where)}"
        )
    try:
        return _import(importer, handle, contents)
    except (InvalidDescriptorError, OutOfBoundsError, AlignmentError) as error:
        # The values came from the other process, not from the caller.
        raise BadHandleError(errno.EINVAL, f"the handle's contents are damaged: {error}") from error
    except DriverError as error:
        # More addresses than there are: the size is damaged.
        if error.code not in _REFUSALS and error.call != "cuMemAddressReserve":
            raise
        raise BadHandleError(
            errno.EINVAL, f"the driver finds no such memory behind the handle: {error}"
        ) from error


# Drivers return these for a descriptor of something else, and for a size other than its memory's:
# INVALID_VALUE, OPERATING_SYSTEM, INVALID_HANDLE, NOT_SUPPORTED, UNKNOWN.
_REFUSALS = (1, 304, 400, 801, 999)


def _import(importer: ImporterLike, handle: Handle, contents: Contents) -> Any:
    memory: Any = importer.import_memory(
        MemoryDescriptor(
            handle,
            handle.kind,
            contents.size,
            read_only=contents.read_only,
            device_uuid=contents.device_uuid,
            pool_pointer=contents.pool_pointer,
        )
    )
    return memory.tensor(
        contents.shape, contents.dtype, offset=contents.offset, strides=contents.strides
    )


def _require_whole(handle: Handle) -> None:
    """Raise BadHandleError for a handle that `export` did not make: it came out of a pickle."""
    for name, is_valid, accepted in _ACCEPTED:
        of = handle if name in ("kind", "contents") else handle.contents
        value = getattr(of, name, _MISSING)
        if not is_valid(value):
            raise BadHandleError(
                errno.EINVAL,
                f"the handle has an invalid {name} = {_shown(value)}: expected {accepted}",
            )


_MISSING = object()


def _shown(value: object) -> str:
    # The text of a damaged object may be an error itself.
    try:
        return "nothing" if value is _MISSING else shown(value)
    except Exception:
        return f"a {type(value).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def _are_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_number, value))


def _is_memory(value: object) -> bool:
    # A pickle may make one without its attributes, or with others.
    try:
        return isinstance(value, MemoryInfo) and replace(value) == value
    except MemoryError:
        raise
    except Exception:
        return False


def _is_dtype(value: object) -> bool:
    import numpy as np

    # NumPy cannot even compute the hash of a damaged structured dtype; no tensor has one.
    return isinstance(value, np.dtype) and value.names is None and value.fields is None


# `export` makes handles of memory of these kinds.
_KINDS = (MemoryHandleType.MEMFD, MemoryHandleType.CUDA_VMM_FD, MemoryHandleType.CUDA_POOL_FD)

_ACCEPTED: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "kind",
        lambda value: isinstance(value, MemoryHandleType) and value in _KINDS,
        "MEMFD, CUDA_VMM_FD, CUDA_POOL_FD or HOST_TIMELINE",
    ),
    ("contents", lambda value: isinstance(value, Contents), "the Contents of exported memory"),
    ("memory", _is_memory, "a MemoryInfo"),
    ("device_uuid", lambda value: value is None or isinstance(value, str), "a str or None"),
    ("size", _is_number, "a number of bytes"),
    ("offset", _is_number, "a number of bytes"),
    ("shape", _are_numbers, "a tuple of int"),
    ("strides", _are_numbers, "a tuple of int"),
    ("dtype", _is_dtype, "a numpy.dtype"),
    ("read_only", lambda value: isinstance(value, bool), "True or False"),
    ("pool_pointer", lambda value: value is None or isinstance(value, bytes), "bytes or None"),
)


def _device_of(contents: Contents) -> Device:
    device = contents.memory.device
    if contents.device_uuid is None:
        return device if device in devices() else Device("host")
    return device_of_uuid(contents.device_uuid)

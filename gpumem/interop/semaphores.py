"""Importing timelines: what a device can take, and who owns the handle before and after."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from operator import index
from typing import TYPE_CHECKING, Any

from gpumem.device import Device
from gpumem.errors import (
    BadHandleError,
    DeviceMismatchError,
    InvalidDescriptorError,
    UnsupportedHandleTypeError,
)
from gpumem.interop._driver_timeline import import_fd, import_windows
from gpumem.interop._host_timeline import HostTimeline
from gpumem.interop.descriptors import (
    WINDOWS_TYPES,
    Capability,
    SemaphoreDescriptor,
    SemaphoreType,
)

if TYPE_CHECKING:
    from gpumem.interop._timeline import Timeline

# The driver's numbers of the types that it takes as NT handle or name.
_DRIVER_TYPES = {SemaphoreType.D3D12_FENCE: 4, SemaphoreType.TIMELINE_WIN32: 10}


def speaks_windows(device: Device) -> bool:
    """Tell whether a device's driver takes NT handles: on Windows, or in a host rehearsal."""
    from gpumem import _host

    return sys.platform == "win32" or (device.type == "host" and _host.windows_rehearsed())


def semaphore_capability(device: Device | str, kind: SemaphoreType) -> Capability:
    """Tell whether a device can import a kind of timeline and, if not, why.

    Parameters
    ----------
    device : Device or str
    kind : SemaphoreType

    Returns
    -------
    Capability

    Raises
    ------
    TypeError
        `kind` is no SemaphoreType. Nothing else: a device that is not there is an answer.
    """
    if not isinstance(kind, SemaphoreType):
        raise TypeError(f"kind must be a SemaphoreType, not {kind!r}")
    where = Device(device)
    if kind in WINDOWS_TYPES and not speaks_windows(where):
        return Capability(False, f"a {kind.name} is Windows' own; this is {sys.platform}")
    name = "timeline_semaphores"
    if kind is SemaphoreType.HOST_TIMELINE and where.type != "host":
        name = "stream_memory_operations"
    asked = where.capabilities[name]
    return Capability(asked.supported, asked.reason)


def import_semaphore(
    device: Device | str, descriptor: SemaphoreDescriptor, consume: bool = False
) -> Timeline:
    """Make a timeline of what somebody else exported.

    Parameters
    ----------
    device : Device or str
    descriptor : SemaphoreDescriptor
    consume : bool
        Close the caller's handle, last of all and only after success. Else it stays the caller's,
        who may close it at once. Either way the import has a reference of its own.

    Returns
    -------
    Timeline
        A HostTimeline of that device, if that is what the handle stands for.

    Raises
    ------
    TypeError
        `descriptor` is no SemaphoreDescriptor.
    UnsupportedHandleTypeError
        The device cannot import that type; the message is the reason.
    InvalidDescriptorError
        A name was to be consumed.
    DeviceMismatchError
        The timeline belongs to another device.
    BadHandleError
        The handle is not open, or stands for something else.
    DriverError
        The driver refused. The handle is as it was, as after every error.
    """
    if not isinstance(descriptor, SemaphoreDescriptor):
        raise TypeError(f"it takes a SemaphoreDescriptor, not {descriptor!r}")
    where = Device(device)
    able = semaphore_capability(where, descriptor.type)
    if not able:
        raise UnsupportedHandleTypeError(able.reason)
    _check_device(where, descriptor)
    handle = descriptor.handle
    if isinstance(handle, str):
        if consume:
            raise InvalidDescriptorError(f"the name {handle!r} is nothing to consume")
        return import_windows(where, _DRIVER_TYPES[descriptor.type], handle)
    timeline = _import_number(where, descriptor.type, _number(handle))
    if consume:
        _close(handle)
    return timeline


def _import_number(device: Device, kind: SemaphoreType, number: int) -> Timeline:
    if kind is SemaphoreType.HOST_TIMELINE:
        return HostTimeline.from_fd(number, device)
    if kind is SemaphoreType.TIMELINE_OPAQUE_FD:
        return import_fd(device, number)
    return import_windows(device, _DRIVER_TYPES[kind], number)


def _check_device(device: Device, descriptor: SemaphoreDescriptor) -> None:
    theirs, ours = descriptor.device_uuid, device.uuid
    if theirs is not None and theirs != ours:
        raise DeviceMismatchError(
            f"the timeline belongs to device {theirs!r}, and {device} is {ours!r}"
        )


def _number(handle: Any) -> int:
    number = handle.fileno() if hasattr(handle, "fileno") else handle
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidDescriptorError(f"handle {handle!r}: fileno() gave {number!r}")
    if number < 0:
        raise BadHandleError(errno.EBADF, f"handle {handle!r}: descriptor {number} is closed")
    return index(number)


def _close(handle: Any) -> None:
    """Close what was consumed: an object by its own means, so that it does not close it again."""
    if hasattr(handle, "close"):
        handle.close()
    elif hasattr(handle, "fileno"):
        with contextlib.suppress(OSError):
            os.close(handle.fileno())
    else:
        os.close(handle)

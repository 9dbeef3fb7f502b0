"""Importing timelines: which kinds a device supports, and who owns the handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem.device import Device
from gpumem.errors import UnsupportedHandleTypeError
from gpumem.interop.descriptors import (
    WINDOWS_TYPES,
    InteropCapability,
    SemaphoreDescriptor,
    SemaphoreType,
    duplicate,
    require_consumable,
    require_device,
)
from gpumem.interop.descriptors import consume as consume_handle
from gpumem.interop.memory.kinds import NOT_ON_LINUX, speaks_windows
from gpumem.interop.timelines._kinds import HostTimeline, import_fd, import_windows

if TYPE_CHECKING:
    from gpumem.interop.timelines._timeline import Timeline

# The driver's numbers of the types that are imported by an NT handle or a name.
_DRIVER_TYPES = {SemaphoreType.D3D12_FENCE: 4, SemaphoreType.TIMELINE_WIN32: 10}


def semaphore_capability(device: Device | str, kind: SemaphoreType) -> InteropCapability:
    """Tell whether a device can import a kind of timeline and, if not, why.

    Parameters
    ----------
    device : Device or str
    kind : SemaphoreType

    Returns
    -------
    InteropCapability

    Raises
    ------
    TypeError
        `kind` is not a SemaphoreType. Nothing else: a device that is not there is an answer.
    """
    if not isinstance(kind, SemaphoreType):
        raise TypeError(f"kind must be a SemaphoreType, not {kind!r}")
    where = Device(device)
    if kind in WINDOWS_TYPES and not speaks_windows(where):
        return InteropCapability(False, NOT_ON_LINUX)
    name = "timeline_semaphores"
    if kind is SemaphoreType.HOST_TIMELINE and where.type != "host":
        name = "stream_memory_operations"
    asked = where.capabilities[name]
    return InteropCapability(asked.supported, asked.reason)


def import_semaphore(
    device: Device | str, descriptor: SemaphoreDescriptor, consume: bool = False
) -> Timeline:
    """Import a timeline that another API or process exported.

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
        `descriptor` is not a SemaphoreDescriptor.
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
        raise TypeError(f"expected a SemaphoreDescriptor, not {descriptor!r}")
    where = Device(device)
    able = semaphore_capability(where, descriptor.type)
    if not able:
        raise UnsupportedHandleTypeError(able.reason)
    require_device(descriptor, where)
    require_consumable(descriptor.handle, consume)
    if isinstance(descriptor.handle, str):
        return import_windows(where, _DRIVER_TYPES[descriptor.type], descriptor.handle)
    with duplicate(descriptor.handle) as own:
        timeline = _import_number(where, descriptor.type, own.fileno())
    if consume:
        consume_handle(descriptor.handle)
    return timeline


def _import_number(device: Device, kind: SemaphoreType, number: int) -> Timeline:
    if kind is SemaphoreType.HOST_TIMELINE:
        return HostTimeline.from_fd(number, device)
    if kind is SemaphoreType.TIMELINE_OPAQUE_FD:
        return import_fd(device, number)
    return import_windows(device, _DRIVER_TYPES[kind], number)

"""Importing timelines: which kinds a device supports, and who owns the handle."""

from __future__ import annotations

from gpumem.device import Device
from gpumem.errors import UnsupportedHandleTypeError
from gpumem.interop.descriptors import (
    NOT_ON_LINUX,
    WINDOWS_TYPES,
    InteropCapability,
    SemaphoreDescriptor,
    SemaphoreType,
    duplicate,
    keep_from_shrinking,
    require_consumable,
    require_device,
)
from gpumem.interop.descriptors import consume as consume_handle
from gpumem.interop.timelines._timeline import HostTimeline, Timeline, import_fd


def semaphore_capability(device: Device | str, kind: SemaphoreType) -> InteropCapability:
    """Return whether a device can import a kind of timeline and, if not, why.

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
        `kind` is not a SemaphoreType. A missing device is an answer, not an error.
    """
    if not isinstance(kind, SemaphoreType):
        raise TypeError(f"kind must be a SemaphoreType, not {kind!r}")
    where = Device(device)
    if kind in WINDOWS_TYPES:
        return InteropCapability(False, NOT_ON_LINUX)
    name = "timeline_semaphores"
    if kind is SemaphoreType.HOST_TIMELINE and where.type != "host":
        name = "stream_memory_operations"
    able = where.capabilities[name]
    return InteropCapability(able.supported, able.reason)


def import_semaphore(
    device: Device | str, descriptor: SemaphoreDescriptor, consume: bool = False
) -> Timeline:
    """Import a timeline that another API or process exported.

    Parameters
    ----------
    device : Device or str
    descriptor : SemaphoreDescriptor
    consume : bool
        Close the caller's handle, last of all and only after success. Otherwise the caller keeps
        it and may close it at once. Either way the import has a reference of its own.

    Returns
    -------
    Timeline
        A HostTimeline of that device, if the handle is of one.

    Raises
    ------
    TypeError
        `descriptor` is not a SemaphoreDescriptor.
    UnsupportedHandleTypeError
        The device cannot import that type; the message is the reason.
    InvalidDescriptorError
        `consume` with a handle that is not a descriptor.
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
    timeline: Timeline
    with duplicate(descriptor.handle) as own:
        if descriptor.type is SemaphoreType.HOST_TIMELINE:
            timeline = HostTimeline.from_fd(own, where)
        else:
            keep_from_shrinking(own)
            timeline = import_fd(where, own.fileno())
    if consume:
        consume_handle(descriptor.handle)
    return timeline

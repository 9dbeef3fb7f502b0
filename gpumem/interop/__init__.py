"""Memory and timelines from outside: Vulkan, Direct3D 12, other processes, other libraries."""

from gpumem._handle import Handle
from gpumem.interop._driver_timeline import DriverTimeline
from gpumem.interop._host_timeline import HostTimeline
from gpumem.interop._memory import ExternalMemory
from gpumem.interop._timeline import Timeline, TimelinePoint
from gpumem.interop.descriptors import (
    InteropCapability,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)
from gpumem.interop.importer import Importer
from gpumem.interop.sharing import Contents, attach, export

__all__ = [
    "Contents",
    "DriverTimeline",
    "ExternalMemory",
    "Handle",
    "HostTimeline",
    "Importer",
    "InteropCapability",
    "MemoryDescriptor",
    "MemoryHandleType",
    "SemaphoreDescriptor",
    "SemaphoreType",
    "Timeline",
    "TimelinePoint",
    "attach",
    "export",
]

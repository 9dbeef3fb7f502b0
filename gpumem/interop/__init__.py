"""Memory and timelines from outside: Vulkan, Direct3D 12, other processes, other libraries.

``descriptors`` is what a producer fills in, ``importer`` takes it, ``memory`` makes tensors of it
(a Vulkan handle becomes a tensor there), ``timelines`` orders access, ``sharing`` exports tensors
to other processes. ``vulkan`` is the producer's side of it.
"""

from gpumem._buffer.transport import Registration, Transports, transports
from gpumem._resource.handle import Handle
from gpumem.interop.descriptors import (
    InteropCapability,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)
from gpumem.interop.importer import Importer
from gpumem.interop.memory._external_memory import ExternalMemory
from gpumem.interop.sharing import Contents, attach, export
from gpumem.interop.timelines._kinds import DriverTimeline, HostTimeline
from gpumem.interop.timelines._timeline import Timeline, TimelinePoint

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
    "Registration",
    "SemaphoreDescriptor",
    "SemaphoreType",
    "Timeline",
    "TimelinePoint",
    "Transports",
    "attach",
    "export",
    "transports",
]

"""Memory and timelines from outside: Vulkan, other processes, other libraries.

A producer fills in the values of ``descriptors``. ``importer`` accepts them, ``memory`` makes
tensors of them (a Vulkan handle becomes a tensor there), ``timelines`` orders access, ``sharing``
exports tensors to other processes, and ``sealed`` keeps them beyond the process that made them.
"""

from gpumem._buffer.transport import Registration, Transports, transports
from gpumem._resource.handle import Handle
from gpumem._support.signatures import published
from gpumem.interop.descriptors import (
    InteropCapability,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)
from gpumem.interop.importer import Importer
from gpumem.interop.memory._external_memory import ExternalMemory
from gpumem.interop.sealed import SealedSet, drop, open, seal, sealed_sets
from gpumem.interop.sharing import Contents, attach, export
from gpumem.interop.timelines._timeline import (
    DriverTimeline,
    HostTimeline,
    Timeline,
    TimelinePoint,
)

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
    "SealedSet",
    "SemaphoreDescriptor",
    "SemaphoreType",
    "Timeline",
    "TimelinePoint",
    "Transports",
    "attach",
    "drop",
    "export",
    "open",
    "seal",
    "sealed_sets",
    "transports",
]
__dir__ = published(globals())

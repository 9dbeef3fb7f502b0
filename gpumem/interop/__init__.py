"""Memory and timelines from outside: Vulkan, Direct3D 12, other processes, other libraries."""

from gpumem._handle import Handle
from gpumem.interop._memory import ExternalMemory
from gpumem.interop.descriptors import (
    Capability,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)
from gpumem.interop.importer import Importer, importer_for, importer_reason, register_importer
from gpumem.interop.sharing import Contents, attach, export

__all__ = [
    "Capability",
    "Contents",
    "ExternalMemory",
    "Handle",
    "Importer",
    "MemoryDescriptor",
    "MemoryHandleType",
    "SemaphoreDescriptor",
    "SemaphoreType",
    "attach",
    "export",
    "importer_for",
    "importer_reason",
    "register_importer",
]

"""Memory and timelines from outside: Vulkan, Direct3D 12, other processes, other libraries."""

from gpumem._handle import Handle
from gpumem.interop.descriptors import (
    Capability,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)

__all__ = [
    "Capability",
    "Handle",
    "MemoryDescriptor",
    "MemoryHandleType",
    "SemaphoreDescriptor",
    "SemaphoreType",
]

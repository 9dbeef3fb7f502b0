"""Which DLPack devices a memory may be told to be on, and what a consumer there waits for."""

from gpumem._buffer cimport Buffer, MemoryResource
from gpumem._dlpack cimport DLDevice

# Whether a device reads the resource's memory as it is.
cdef bint export_reaches(MemoryResource resource, DLDevice device)
cdef object export_refusal(MemoryResource resource, DLDevice device)
# A device from what users write: a name, a type, a pair.
cdef DLDevice export_named(MemoryResource resource, object named) except *
# Orders a consumer behind what was queued: its stream, or the CPU.
cdef int export_order(Buffer buffer, DLDevice device, object stream) except -1

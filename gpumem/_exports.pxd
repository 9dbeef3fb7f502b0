"""Which DLPack devices a memory may be told to be on, and what a consumer there waits for."""

from gpumem._buffer cimport Buffer, MemoryResource
from gpumem._dlpack cimport DL_CPU, DLDevice
from gpumem._order cimport order_host

# Whether a device reads the resource's memory as it is.
cdef bint export_reaches(MemoryResource resource, DLDevice device)
cdef object export_refusal(MemoryResource resource, DLDevice device)
# A device from what users write: a name, a type, a pair.
cdef DLDevice export_named(MemoryResource resource, object named) except *
# Orders a consumer behind what was queued: its stream, or the CPU.
cdef inline int export_order(Buffer buffer, DLDevice device, object stream) except -1:
    if stream is None and device.device_type == DL_CPU:
        return order_host(buffer)
    return order_consumer(buffer, device, stream)


cdef int order_consumer(Buffer buffer, DLDevice device, object stream) except -1

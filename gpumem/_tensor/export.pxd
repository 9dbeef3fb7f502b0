"""How memory is exported to DLPack consumers."""

from gpumem._buffer cimport Buffer, DL_CPU, DLDevice, order_host, ResourceBase

# Whether a DLPack device reaches the memory of a resource, and the BufferError where it does not.
cdef bint export_reaches(ResourceBase resource, DLDevice device)
cdef object export_refusal(ResourceBase resource, DLDevice device)
# The device that `Tensor.export_as` names.
cdef DLDevice export_named(ResourceBase resource, object named) except *
# Orders a consumer, its stream or the CPU, after queued work.
cdef inline int export_order(Buffer buffer, DLDevice device, object stream) except -1:
    if stream is None and device.device_type == DL_CPU:
        return order_host(buffer)
    return order_consumer(buffer, device, stream)


cdef int order_consumer(Buffer buffer, DLDevice device, object stream) except -1

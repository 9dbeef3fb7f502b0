"""Streams and events as Python objects, and reading a stream from what users hand over."""

from gpumem._native.driver cimport CUevent, CUresult, CUstream, DeviceContext, DriverDevice

cdef class Event

cdef class Stream:
    cdef readonly object device     # the Device it belongs to
    cdef DriverDevice driver_device
    cdef CUstream handle
    cdef bint owned                 # destroy it with this object
    cdef object owner               # keeps a foreign stream alive
    cdef object __weakref__
    cdef int _wait_event(self, Event event) except -1

cdef class Event:
    cdef readonly object device
    cdef DriverDevice driver_device
    cdef CUevent handle
    cdef object __weakref__

# The native handle of None (the legacy default stream), a Stream, an int, or any object with
# __cuda_stream__ or a framework's stream; a Stream of another device is a ValueError.
cdef int stream_handle(object stream, DriverDevice driver_device, CUstream* handle) except -1
# Makes `later` wait, on the device, for what is queued on `earlier`, of the current context.
cdef CUresult stream_follow(DeviceContext* here, CUstream earlier, DeviceContext* there,
                            CUstream later) noexcept nogil
# Whether what is queued on it now becomes a part of a graph.
cdef CUresult stream_is_capturing(DeviceContext* context, CUstream stream,
                                  bint* capturing) noexcept nogil
cdef bint is_capturing(DriverDevice driver_device, CUstream stream) except -1
# Whether a stream ends with its object, so that no other object may replace it.
cdef bint keeps_itself(object stream) noexcept
# Of a stream object of any library; None where it does not say, as a bare handle.
cdef object device_of_stream(object stream)

"""Timeline: what all kinds of timelines have in common."""

from libc.stdint cimport uint64_t

from gpumem._native.driver cimport CUstream, DeviceContext, DriverDevice
from gpumem.interop.timelines._core cimport Outcome, TimelineCore

# core_enqueue_wait or core_enqueue_signal.
ctypedef int (*stream_operation)(TimelineCore* core, DeviceContext* context, CUstream stream,
                                 uint64_t value, Outcome* out) noexcept nogil

cdef class Timeline:
    cdef TimelineCore* core         # NULL: closed
    cdef readonly object device     # whose streams may use it; None: any device's
    cdef DriverDevice driver_device         # that device; None: any
    cdef int inside                 # threads in a call without the interpreter lock
    cdef bint imported              # closed in a forked child
    cdef object __weakref__

    cdef int enter(self) except -1
    cdef int after_fork(self) except -1
    cdef bint is_parents(self)
    cdef void retire(self)
    cdef int refuse_if_inside(self) except -1
    cdef int wait_until_idle(self, uint64_t deadline) except -1
    cdef int wait_for_page(self, uint64_t value, uint64_t deadline, object timeout) except -1
    cdef int wait_by_stream(self, uint64_t value, uint64_t deadline, object timeout) except -1
    cdef int enqueue(self, stream_operation operation, object stream, object value) except -1
    cdef DriverDevice stream_of(self, object stream, CUstream* handle)
    cdef int report(self, int status, Outcome* out, object value) except -1
    cdef str progress(self)

# A timeline's value from what users write; NonMonotonicError below `lowest`.
cdef uint64_t value_in(object value, uint64_t lowest, str name) except? 0

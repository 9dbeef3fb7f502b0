"""Timeline: what all kinds of timelines have in common."""

from libc.stdint cimport uint64_t

from gpumem._native.driver cimport DriverDevice
from gpumem.interop.timelines._core cimport TimelineCore

cdef class Timeline:
    cdef TimelineCore* core         # NULL: closed
    cdef readonly object device     # whose streams may use it; None: any device's
    cdef DriverDevice driver_device         # that device; None: any
    cdef int inside                 # threads in a call without the interpreter lock
    cdef bint imported              # closed in a forked child
    cdef object __weakref__

    cdef int enter(self) except -1
    cdef void retire(self)

# A timeline's value from what users write; NonMonotonicError below `lowest`.
cdef uint64_t value_in(object value, uint64_t lowest, str name) except? 0

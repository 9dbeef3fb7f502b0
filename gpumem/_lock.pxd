"""The lock of include/lock.h, for structs that hold one and modules that take it."""

from libc.stdint cimport int32_t

cdef extern from "lock.h" nogil:
    ctypedef struct Lock:
        int32_t state
    void lock_init(Lock* lock)
    void lock_acquire(Lock* lock)
    void lock_release(Lock* lock)
    int lock_try(Lock* lock)

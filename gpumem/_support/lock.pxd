"""The locks of include/lock.h and include/owner_lock.h."""

from libc.stdint cimport int32_t

cdef extern from "lock.h" nogil:
    ctypedef struct Lock:
        int32_t state
    void lock_init(Lock* lock)
    void lock_acquire(Lock* lock)
    void lock_release(Lock* lock)
    bint lock_try(Lock* lock)

# One thread, the owner, enters without an atomic operation; all others are visitors.
cdef extern from "owner_lock.h" nogil:
    ctypedef struct OwnerLock:
        pass
    bint owner_is_biased()
    void owner_lock_init(OwnerLock* lock, bint biased)
    void owner_enter(OwnerLock* lock)
    void owner_leave(OwnerLock* lock)
    void visitor_enter(OwnerLock* lock)
    void visitor_leave(OwnerLock* lock)
    # The first thread that enters is the owner, until a second one enters.
    void biased_enter(OwnerLock* lock)
    void biased_leave(OwnerLock* lock)

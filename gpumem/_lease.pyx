"""Counting leases; see _lease.pxd."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from "atomics.h" nogil:
    int32_t count_add(int32_t* count, int32_t by)


cdef Lease* lease_create(uint64_t handle, uint64_t address, uint64_t nbytes, uint32_t stream,
                         void* owner, void (*release)(Lease*) noexcept nogil) noexcept nogil:
    cdef Lease* lease = <Lease*>malloc(sizeof(Lease))
    if lease == NULL:
        return NULL
    lease.references = 1
    lease.stream = stream
    lease.handle = handle
    lease.address = address
    lease.nbytes = nbytes
    lease.owner = owner
    lease.release = release
    return lease


cdef void lease_retain(Lease* lease) noexcept nogil:
    count_add(&lease.references, 1)


cdef void lease_drop(Lease* lease) noexcept nogil:
    if lease == NULL or count_add(&lease.references, -1) != 0:
        return
    lease.release(lease)
    free(lease)

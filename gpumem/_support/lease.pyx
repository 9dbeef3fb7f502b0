"""Leases and the streams recorded for blocks; see lease.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc

from gpumem._support.atomics cimport count64_add


cdef Lease* lease_create(uint64_t handle, uint64_t address, uint64_t nbytes, uint32_t stream_slot,
                         void* owner, void (*release)(Lease*) noexcept nogil) noexcept nogil:
    cdef Lease* lease = <Lease*>malloc(sizeof(Lease))
    if lease == NULL:
        return NULL
    lease.views.begun = 0
    lease.views.ended = 0
    lease.stream_slot = stream_slot
    lease.handle = handle
    lease.address = address
    lease.nbytes = nbytes
    lease.uses = NULL
    lease.owner = owner
    lease.release = release
    lease.owner_views = NULL
    lease.view_room = NULL
    return lease


cdef bint uses_add(Uses** uses, uint32_t slot, bint* added) noexcept nogil:
    cdef Uses* noted = uses[0]
    cdef uint32_t i
    added[0] = False
    if noted != NULL:
        for i in range(noted.count):
            if noted.at[i].slot == slot:
                return True
    if not uses_reserve(uses, noted.count + 1 if noted != NULL else 1):
        return False
    noted = uses[0]
    noted.at[noted.count].slot = slot
    noted.at[noted.count].until = 0
    noted.count += 1
    added[0] = True
    return True


cdef bint uses_reserve(Uses** uses, uint32_t count) noexcept nogil:
    cdef Uses* noted = uses[0]
    cdef Use* grown
    cdef uint32_t capacity
    if noted == NULL:
        noted = <Uses*>calloc(1, sizeof(Uses))
        if noted == NULL:
            return False
    if noted.capacity < count:
        capacity = max(count, noted.capacity * 2, <uint32_t>2)
        grown = <Use*>realloc(noted.at, capacity * sizeof(Use))
        if grown == NULL:
            if uses[0] == NULL:
                free(noted)
            return False
        noted.at = grown
        noted.capacity = capacity
    uses[0] = noted
    return True


cdef void uses_free(Uses* uses) noexcept nogil:
    if uses != NULL:
        free(uses.at)
        free(uses)


cdef void lease_drop(Lease* lease) noexcept nogil:
    if lease == NULL:
        return
    if lease.owner_views != NULL:   # before this view's own end, while the lease keeps its owner
        count64_add(&lease.owner_views.ended, 1)
    end(lease, 1)


cdef void lease_drop_buffer(Lease* lease) noexcept nogil:
    end(lease, 0 - lease.views.begun)


cdef inline void end(Lease* lease, uint64_t by) noexcept nogil:
    # The lease may be gone after the addition, except for the last end.
    if count64_add(&lease.views.ended, by) == 0:
        lease.release(lease)
        free(lease.view_room)
        free(lease)

"""Counting leases."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc

from gpumem._support.atomics cimport count_up, load64


cdef Lease* lease_create(uint64_t handle, uint64_t address, uint64_t nbytes, uint32_t stream,
                         void* owner, void (*release)(Lease*) noexcept nogil) noexcept nogil:
    cdef Lease* lease = <Lease*>malloc(sizeof(Lease))
    if lease == NULL:
        return NULL
    lease.claims.begun = 1
    lease.claims.ended = 0
    lease.stream = stream
    lease.handle = handle
    lease.address = address
    lease.nbytes = nbytes
    lease.uses = NULL
    lease.owner = owner
    lease.release = release
    lease.views = NULL
    return lease


cdef bint uses_add(Uses** uses, uint32_t slot, bint* added) noexcept nogil:
    cdef Uses* noted = uses[0]
    cdef Use* grown
    cdef uint32_t i, capacity
    added[0] = False
    if noted == NULL:
        noted = <Uses*>calloc(1, sizeof(Uses))
        if noted == NULL:
            return False
    for i in range(noted.count):
        if noted.at[i].slot == slot:
            return True
    if noted.count == noted.capacity:
        capacity = noted.capacity * 2 if noted.capacity else 2
        grown = <Use*>realloc(noted.at, capacity * sizeof(Use))
        if grown == NULL:
            if uses[0] == NULL:
                free(noted)
            return False
        noted.at = grown
        noted.capacity = capacity
    noted.at[noted.count].slot = slot
    noted.at[noted.count].until = 0
    noted.count += 1
    uses[0] = noted
    added[0] = True
    return True


cdef void uses_free(Uses* uses) noexcept nogil:
    if uses != NULL:
        free(uses.at)
        free(uses)


cdef inline bint claim_end(Claims* claims) noexcept nogil:
    """Tell whether it was the last."""
    return count_up(&claims.ended) == load64(&claims.begun)


cdef void lease_drop(Lease* lease) noexcept nogil:
    if lease == NULL:
        return
    if lease.views != NULL:
        claim_end(lease.views)
    lease_drop_buffer(lease)


cdef void lease_drop_buffer(Lease* lease) noexcept nogil:
    if claim_end(&lease.claims):
        lease.release(lease)
        free(lease)

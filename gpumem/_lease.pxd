"""Leases: counted claims on a block by its views, held without the interpreter.

A DLPack capsule or a buffer view holds a lease, not a Python object, so that a consumer may drop it
on any thread. Whoever makes the lease says how the block goes back; the last drop does it.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef struct Lease:
    int32_t references      # atomic
    uint32_t stream         # slot the block is freed on
    uint64_t handle         # of the block, as its resource knows it
    uint64_t address
    uint64_t nbytes
    void* owner             # what `release` needs; counted by it
    void (*release)(Lease* lease) noexcept nogil    # frees the block and drops the owner

cdef Lease* lease_create(uint64_t handle, uint64_t address, uint64_t nbytes, uint32_t stream,
                         void* owner, void (*release)(Lease*) noexcept nogil) noexcept nogil
cdef void lease_retain(Lease* lease) noexcept nogil
# NULL is nobody's lease, of an empty buffer.
cdef void lease_drop(Lease* lease) noexcept nogil

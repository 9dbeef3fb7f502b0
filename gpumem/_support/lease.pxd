"""Leases: counted claims on a block by its views, held without the interpreter.

A DLPack capsule or a buffer view holds a lease, not a Python object, so that a consumer may drop it
on any thread. Whoever makes the lease says how the block goes back; the last drop does it.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._support.atomics cimport load64, store64

# Another stream that uses a block too. Which number names it is the resource's matter; an arena
# says, when the block is freed, behind which epoch of the stream that use ends.
cdef struct Use:
    uint32_t slot
    uint64_t until

# The streams recorded for one block. Grows while the block lives, so that a free allocates nothing.
# The rest is the arena's, for a block that is freed and waits for these streams.
cdef struct Uses:
    Use* at
    uint32_t count
    uint32_t capacity
    Uses* next
    uint64_t handle         # of the block
    uint32_t stream_slot    # of the stream it was freed on, and that stream's epoch at the free
    uint64_t epoch

# Claims that began and claims that ended. One begins with the interpreter lock, while its buffer's
# own is held; one ends on any thread. Who ends the last finds both equal, and nobody else does: who
# sees that the buffer's own has ended sees the last beginning, and until then one is left over. Two
# counters, so that only an end is an atomic operation.
cdef struct Claims:
    uint64_t begun
    uint64_t ended

cdef struct Lease:
    Claims claims           # the buffer's own, and its views'
    uint32_t stream         # slot the block is freed on
    uint64_t handle         # of the block, as its resource knows it
    uint64_t address
    uint64_t nbytes
    Uses* uses              # recorded streams; NULL: none. `release` takes them over
    void* owner             # what `release` needs; counted by it
    void (*release)(Lease* lease) noexcept nogil    # frees the block and drops the owner
    Claims* views           # the owner's count of all views, this lease's too; NULL: not counted

cdef Lease* lease_create(uint64_t handle, uint64_t address, uint64_t nbytes, uint32_t stream,
                         void* owner, void (*release)(Lease*) noexcept nogil) noexcept nogil
# Notes a stream once; False if the host has no memory, nothing changed. `added`: it is new.
cdef bint uses_add(Uses** uses, uint32_t slot, bint* added) noexcept nogil
cdef void uses_free(Uses* uses) noexcept nogil

cdef inline void claim_begin(Claims* claims) noexcept nogil:
    store64(&claims.begun, load64(&claims.begun) + 1)


cdef inline uint64_t claims_held(const Claims* claims) noexcept nogil:
    return load64(&claims.begun) - load64(&claims.ended)


# For a view; with the interpreter lock. The claim that the lease was made with is its buffer's.
cdef inline void lease_retain(Lease* lease) noexcept:
    claim_begin(&lease.claims)
    if lease.views != NULL:
        claim_begin(lease.views)


# The buffer's own claim goes; the views' stay.
cdef void lease_drop_buffer(Lease* lease) noexcept nogil
# NULL is nobody's lease, of an empty buffer.
cdef void lease_drop(Lease* lease) noexcept nogil

"""Arenas as other libraries' C hooks see them: streams by native handle, blocks by address.

An *outlet* is one arena for such callers. The blocks of all outlets are in one book, by address,
because a hook may be told nothing else about a block. None of it needs the interpreter, and every
function may be called from any thread.

The book is a hash table with linear probing, in shards with a lock each; an entry is taken out
before its block is freed, so that an address that is handed out again never meets its old entry.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

from gpumem._native.arena.types cimport ArenaCore
from gpumem._native.driver cimport CUstream
from gpumem._support.lock cimport Lock

cdef enum:
    OUTLET_STREAMS = 64     # an outlet remembers by handle; others are looked up at every use

cdef struct StreamName:
    uint64_t handle
    uint32_t slot           # of the arena; claimed by the outlet

# What was handed out through an outlet, whatever else its arena serves. Exact at rest; all atomic.
cdef struct OutletCounts:
    uint64_t allocs
    uint64_t frees
    uint64_t allocated      # bytes as asked for, ever
    uint64_t freed
    uint64_t peak           # the highest of their difference

cdef struct Outlet:
    ArenaCore* arena        # a reference
    int32_t references      # the owner's and each live block's (atomic)
    uint8_t framework       # who calls, by its number in _support/events
    Outlet* counted         # where its blocks are counted, a reference; NULL: here
    OutletCounts counts
    uint32_t count          # of `names`; only rises, read without the lock
    Lock lock               # of adding one
    StreamName names[OUTLET_STREAMS]

# NULL: no host memory. `outlet_drop` ends the owner's reference. `counted`: what counts its blocks
# besides its own; NULL: itself.
cdef Outlet* outlet_create(ArenaCore* arena, Outlet* counted, uint8_t framework) noexcept nogil
cdef void outlet_retain(Outlet* outlet) noexcept nogil
cdef void outlet_drop(Outlet* outlet) noexcept nogil

# A block of at least one byte for work on the stream; an ArenaStatus.
cdef int outlet_allocate(Outlet* outlet, uint64_t nbytes, CUstream stream,
                         uint64_t* address) noexcept nogil
# The same in a region of its own, as a persistent block; also for a stream that captures.
cdef int outlet_allocate_alone(Outlet* outlet, uint64_t nbytes, CUstream stream,
                               uint64_t* address) noexcept nogil

# ARENA_STALE: no live block of an outlet begins there. Frees it on the stream it was taken for.
cdef int outlet_free(uint64_t address) noexcept nogil
# Another stream uses the block too: it is handed out again only behind that use.
cdef int outlet_record(uint64_t address, CUstream stream) noexcept nogil
# Bytes that were asked for at the address; 0: no live block of an outlet begins there.
cdef uint64_t outlet_size(uint64_t address) noexcept nogil
# Copies address and framework of up to `most` live blocks of an arena; returns how many there are.
cdef uint64_t outlets_blocks(const ArenaCore* arena, uint64_t* addresses, uint8_t* frameworks,
                             uint64_t most) noexcept nogil
# Adds the bytes asked for of an arena's live blocks to the sums of their callers' frameworks.
cdef void outlets_bytes(const ArenaCore* arena, uint64_t* by_framework) noexcept nogil
# The arena's slot of a stream, for reports.
cdef int outlet_slot(Outlet* outlet, CUstream stream, uint32_t* stream_slot) noexcept nogil
cdef OutletCounts outlet_counts(const Outlet* outlet) noexcept nogil
# The peak is what is handed out now.
cdef void outlet_reset_peak(Outlet* outlet) noexcept nogil

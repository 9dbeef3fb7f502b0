"""The arena, as other compiled modules see it."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._buffer cimport Buffer, Stream
from gpumem._native.arena cimport Block
from gpumem._resource.arena cimport Captures, GraphPool, SleepingArena

# Where a block lies: among others; alone; alone in memory that other processes may be given; alone
# in memory that transports can register.
cdef enum Region:
    REGION_OF_MANY
    OWN_REGION
    SHARED_REGION
    TRANSPORT_REGION

cdef class Arena(SleepingArena):
    cdef Stream last_stream             # named last, while it has its slot; one of gpumem's own
    cdef uint32_t last_slot
    cdef list stale                     # released stream objects, until no call is under way
    cdef Captures captures              # None until a graph is captured
    cdef bint default_per_thread        # it is each calling thread's own: its slot is looked up
    cdef uint64_t extra                 # bytes that a block needs more to be aligned as its memory
    cdef bint asks_default              # so it is, or a raw handle that was reset: to be named
    cdef bint obtains_slowly            # for any of these reasons

    cdef void ask_default(self, bint asks) noexcept

    cdef int take(self, uint64_t asked, uint64_t extra, uint32_t slot, Region region,
                  Block* block) except -1
    cdef int take_slow(self, uint64_t nbytes, uint32_t slot, Region region,
                       Block* block) except -1
    cdef int take_relieved(self, uint64_t asked, uint64_t extra, uint32_t slot, Region region,
                           int status, Block* block) except -1
    cdef int take_under_pressure(self, uint64_t asked, uint64_t extra, uint32_t slot,
                                 Region region, Block* block) except -1
    # The pool that serves the slot's stream; None: the arena itself.
    cdef GraphPool pool_for(self, uint32_t slot, bint capturing)
    cdef object take_captured(self, GraphPool pool, object nbytes, uint32_t slot,
                              object alignment)

# A block for work on a stream of another library, named by an object that keeps it. Unlike
# `allocate` it queries whether the stream captures also if the arena has a free block.
cdef Buffer arena_take_on(Arena arena, uint64_t nbytes, Stream stream)
# The same for the device's legacy default stream, which cannot capture.
cdef Buffer arena_take_on_legacy(Arena arena, uint64_t nbytes)
# For a free of an address that is not allocated: raises what a debug heap recorded of it.
cdef int arena_bad_free(Arena arena, uint64_t address) except -1

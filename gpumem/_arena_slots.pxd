"""Slots of an arena's streams: found, made, named by others, vacated."""

from libc.stdint cimport uint32_t

from gpumem._arena_types cimport ArenaCore, ThreadMark
from gpumem._driver cimport CUstream
from gpumem._lease cimport Uses

# Finds or makes the slot of a stream; `fresh`: it named no stream or another one before. 0 and 1
# both name the legacy default stream; 2 names a different stream in each thread. May call the
# driver, to find slots that nothing is marked with.
cdef int arena_stream(ArenaCore* arena, CUstream handle, uint32_t* stream_slot,
                      bint* fresh) noexcept nogil
# The same, and claims the slot before anybody could vacate it.
cdef int arena_claim_stream(ArenaCore* arena, CUstream handle, uint32_t* stream_slot) noexcept nogil
# With the lock, or before anybody else knows the arena. Retains the thread.
cdef int add_stream(ArenaCore* arena, CUstream handle, ThreadMark* thread,
                    uint32_t* stream_slot) noexcept nogil
# While claimed a slot keeps its stream.
cdef void slot_claim(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
cdef void slot_unclaim(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Another stream uses a live block, too. ARENA_NO_METADATA: nothing changed.
cdef int arena_record(ArenaCore* arena, Uses** uses, uint32_t stream_slot) noexcept nogil
# The caller has drained the stream: everything freed on it up to now is free for everyone.
# `silent`: from here on its handle may name nothing, and the driver is not asked about it until
# somebody names it again. True: the slot names no stream any more.
cdef bint arena_reset_stream(ArenaCore* arena, uint32_t stream_slot, bint silent) noexcept nogil
cdef void streams_free(ArenaCore* arena) noexcept nogil

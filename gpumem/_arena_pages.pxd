"""More and less memory for a paged arena: with the grow lock held, the arena lock not."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore, Block

# A block from new or moved pages.
cdef int grow_pages(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                    Block* block) noexcept nogil
# Makes pages for so many bytes more, free for everyone.
cdef int prepare_pages(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# Gives back every page that is idle and has no queued work; returns the bytes.
cdef uint64_t trim_pages(ArenaCore* arena) noexcept nogil
# Memory for a persistent region, in pages that hold nothing else.
cdef int persistent_reserve(ArenaCore* arena, uint64_t size, uint64_t* address) noexcept nogil
# The same back; waits for the device, whose work may still use it. False: refused, not given back.
cdef bint persistent_release(ArenaCore* arena, uint64_t address) noexcept nogil

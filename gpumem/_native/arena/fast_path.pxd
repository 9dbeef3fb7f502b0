"""The fast path of allocation and free: no driver call, no wait.

It returns ARENA_DETOUR where a debug heap, a tag or another reason of `detours` applies:
arena_allocate_fast and arena_free of detours call both.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block, ThreadCache

cdef int allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                       Block* block) noexcept nogil
cdef int free_fast(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil

# The same without the detours.
cdef int block_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        Block* block) noexcept nogil
cdef int block_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
# Frees to the table, past the thread's cache; NULL: the thread has none.
cdef int block_free_locked(ArenaCore* arena, ThreadCache* cache, uint64_t handle,
                           uint32_t stream_slot) noexcept nogil

"""Allocation and free that the fast path leaves to other code before the cache and the table.

The reasons are a debug heap, an open tag, recorded streams, a recorder, a budget of blocks in use,
or an arena that passes each block through to the driver.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.fast_path cimport allocate_fast, free_fast
from gpumem._native.arena.types cimport ARENA_DETOUR, ArenaCore, Block, unlikely
from gpumem._support.lease cimport Uses

cdef int allocate_detoured(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                           Block* block) noexcept nogil
cdef int free_detoured(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil

# No driver call, no wait. On ARENA_MISS call arena_allocate_slow of slow_path, without the
# interpreter lock; its arena_allocate does both.
cdef inline int arena_allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                                    Block* block) noexcept nogil:
    cdef int status = allocate_fast(arena, nbytes, stream_slot, block)
    if unlikely(status == ARENA_DETOUR):
        return allocate_detoured(arena, nbytes, stream_slot, block)
    return status

cdef inline int arena_free(ArenaCore* arena, uint64_t handle,
                           uint32_t stream_slot) noexcept nogil:
    cdef int status = free_fast(arena, handle, stream_slot)
    if unlikely(status == ARENA_DETOUR):
        return free_detoured(arena, handle, stream_slot)
    return status

# Frees a block that other streams were recorded for; takes `uses` over.
cdef int arena_free_used(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                         Uses* uses) noexcept nogil
# With a budget of blocks in use: after charge_request, and an attempt to allocate that ended with
# `status`. Charges the padding, or frees the block and refunds the charge. Returns a status.
cdef int arena_charge_block(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, int status,
                            Block* block) noexcept nogil
# Frees a block that is not charged, or no longer.
cdef int block_free_uncharged(ArenaCore* arena, uint64_t handle,
                              uint32_t stream_slot) noexcept nogil

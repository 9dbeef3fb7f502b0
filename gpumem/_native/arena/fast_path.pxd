"""The fast path of allocation and free; slow_path goes on where it ends."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block
from gpumem._support.lease cimport Uses

# No driver call, no wait. On ARENA_MISS call arena_allocate_slow of slow_path, without the
# interpreter lock; its arena_allocate does both.
cdef int arena_allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                             Block* block) noexcept nogil
cdef int arena_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
# Of a block that other streams were recorded for; takes `uses` over.
cdef int arena_free_used(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                         Uses* uses) noexcept nogil
# With a budget of bytes in use: after charge_request, and an attempt to allocate that ended with
# `status`. Charges what the block is larger, or takes block and charge back. Returns a status.
cdef int arena_charge_block(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, int status,
                            Block* block) noexcept nogil
# Of a block that is not charged, or no longer.
cdef int block_free_uncharged(ArenaCore* arena, uint64_t handle,
                              uint32_t stream_slot) noexcept nogil

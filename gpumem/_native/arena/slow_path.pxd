"""Allocation beyond the fast path: what happens, in order, when memory is out."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.debug_heap.heap cimport heap_pump
from gpumem._native.arena.fast_path cimport arena_allocate_fast
from gpumem._native.arena.types cimport ARENA_MISS, ArenaCore, Block
from gpumem._native.bfc cimport MOST_BYTES

# After ARENA_MISS from the fast path, without the interpreter lock, because it may wait.
# `flags` are AllocateFlags. A persistent block has no fast path, nor one of more than MOST_BYTES,
# which is refused.
cdef int arena_allocate_slow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                             uint32_t flags, Block* block) noexcept nogil

# The fast path, then the slow one. In this file so that a hit costs its caller one call.
cdef inline int arena_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                               Block* block) noexcept nogil:
    cdef int status = ARENA_MISS
    if nbytes <= MOST_BYTES:
        status = arena_allocate_fast(arena, nbytes, stream_slot, block)
    if status != ARENA_MISS:
        return status
    if arena.heap != NULL:
        heap_pump(arena)
    return arena_allocate_slow(arena, nbytes, stream_slot, 0, block)

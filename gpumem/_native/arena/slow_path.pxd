"""Allocation after the fast path: the steps, in order, until memory is out."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.debug_heap.heap cimport heap_pump
from gpumem._native.arena.detours cimport arena_allocate_fast
from gpumem._native.arena.types cimport ARENA_MISS, ArenaCore, ArenaSpan, Block, SpanView
from gpumem._native.arena.values cimport Lack
from gpumem._native.bfc cimport MAX_BYTES

# After ARENA_MISS from the fast path, without the interpreter lock, because it may wait.
# `flags` are AllocateFlags. A persistent block has no fast path, nor one of more than MAX_BYTES,
# which is refused.
cdef int arena_allocate_slow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                             uint32_t flags, Block* block) noexcept nogil

# The fast path, then the slow one. In this file so that a hit costs its caller one call.
cdef inline int arena_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                               Block* block) noexcept nogil:
    cdef int status = ARENA_MISS
    if nbytes <= MAX_BYTES:
        status = arena_allocate_fast(arena, nbytes, stream_slot, block)
    if status != ARENA_MISS:
        return status
    if arena.heap != NULL:
        heap_pump(arena)
    return arena_allocate_slow(arena, nbytes, stream_slot, 0, block)

# ---- A commit of pages of a virtual tensor. No lock is held --------------------------------------

# Brings pages [first, spare) into use, and maps those up to `last` ahead if there is room. Makes
# room as an allocation does, but does not wait.
cdef int span_commit(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last,
                     Lack* lack) noexcept nogil
# Waits as an allocation does for work of other streams, if the commit's `status` says that memory
# is out. ARENA_OK: commit again. Otherwise ARENA_INTERRUPTED, or `status`. `until`: 0 at the first
# wait; the time at which all of them end.
cdef int span_wait(ArenaSpan* span, int status, Lack* lack, uint64_t* until) noexcept nogil

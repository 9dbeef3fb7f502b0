"""Allocation and free without a driver call, from the thread cache and the table.

A block of exactly this size and stream comes from the thread's cache, without the arena's lock;
else a search of the table finds a block, under the lock, or a larger one leaves the thread's cache
for the table and is split. Where there is none, slow_path goes on.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.bookkeeping cimport finish_allocate, table_free
from gpumem._native.arena.thread_cache cimport (
    cache_allocate, cache_find, cache_free, cache_free_fitting, cache_free_last, cache_make,
    cache_may_have, cache_publish,
)
from gpumem._native.arena.types cimport (
    ARENA_DEAD, ARENA_DETOUR, arena_is_open, ARENA_MISS, ARENA_OK, ARENA_STALE, ArenaCore, Block,
    IN_SMALL, switch_needs_event, table_for, table_of, ThreadCache, unlikely,
)
from gpumem._native.bfc cimport Bfc, bfc_allocate, BFC_OK, bfc_resolve, NIL, round_to_quantum
from gpumem._native.driver cimport context_is_dead
from gpumem._support.atomics cimport count_now
from gpumem._support.events cimport is_recorded
from gpumem._support.lock cimport lock_acquire, lock_release, owner_enter, owner_leave


cdef int allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                       Block* block) noexcept nogil:
    # In a fork's child another thread of the parent may have been changing the metadata.
    if context_is_dead(arena.context):
        return ARENA_DEAD
    if unlikely(count_now(&arena.detour) or is_recorded(&arena.events)):
        return ARENA_DETOUR
    return block_allocate(arena, nbytes, stream_slot, block)


cdef int block_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        Block* block) noexcept nogil:
    cdef ThreadCache* cache
    if not arena_is_open(arena):
        return ARENA_MISS
    cache = cache_find(arena)
    if cache == NULL:
        cache = cache_make(arena)
    if cache == NULL:
        return ARENA_MISS
    if (cache_may_have(cache, stream_slot, nbytes)
            and cache_allocate(arena, cache, nbytes, stream_slot, block)):
        return ARENA_OK
    return allocate_locked(arena, cache, nbytes, stream_slot, block)


cdef int allocate_locked(ArenaCore* arena, ThreadCache* cache, uint64_t nbytes,
                         uint32_t stream_slot, Block* block) noexcept nogil:
    cdef uint64_t size = round_to_quantum(nbytes)
    cdef int status = BFC_OK
    cdef uint32_t index = NIL
    cdef Bfc* table
    owner_enter(&cache.lock)
    lock_acquire(&arena.lock)
    # Re-check under the lock. A pending event needs a driver call, which only the slow path makes.
    if (arena_is_open(arena)
            and not (arena.last_stream != stream_slot and switch_needs_event(arena))):
        arena.last_stream = stream_slot
        # Published before the table changes, so that the peak is exact. The block freed last is
        # freed to the table under the same lock, so that this search may use it.
        cache_publish(arena, cache)
        cache_free_last(arena, cache)
        table = table_for(arena, nbytes)
        index = bfc_allocate(table, size, nbytes, stream_slot, &status)
        # A larger block that this thread has cached costs less than the slow path does.
        if (index == NIL and status == BFC_OK
                and cache_free_fitting(arena, cache, size, stream_slot)):
            index = bfc_allocate(table, size, nbytes, stream_slot, &status)
        if index != NIL:
            finish_allocate(arena, cache, table, index, block)
    lock_release(&arena.lock)
    owner_leave(&cache.lock)
    return ARENA_OK if index != NIL else ARENA_MISS


cdef int free_fast(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    if unlikely(count_now(&arena.detour) or is_recorded(&arena.events)):
        return ARENA_DETOUR
    return block_free(arena, handle, stream_slot)


cdef int block_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef ThreadCache* cache
    cdef uint32_t index
    if bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK:
        return ARENA_STALE
    cache = cache_find(arena)
    if cache_free(arena, cache, table, index, stream_slot):
        return ARENA_OK
    return block_free_locked(arena, cache, handle, stream_slot)


cdef int block_free_locked(ArenaCore* arena, ThreadCache* cache, uint64_t handle,
                           uint32_t stream_slot) noexcept nogil:
    cdef int status
    lock_acquire(&arena.lock)
    status = table_free(arena, cache, handle, stream_slot)
    lock_release(&arena.lock)
    return status

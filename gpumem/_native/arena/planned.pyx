"""Blocks at planned places of an arena."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.allocation_events cimport note_allocate
from gpumem._native.arena.bookkeeping cimport finish_allocate
from gpumem._native.arena.streams cimport (
    complete_streams, cover_epoch, release_completed, switch_needs_event, switch_stream,
    wait_behind,
)
from gpumem._native.arena.thread_cache cimport caches_flush
from gpumem._native.arena.types cimport (
    ARENA_CLOSED, ARENA_DEAD, arena_is_open, ARENA_MISS, ARENA_NO_METADATA, ARENA_OK, ARENA_STALE,
    ArenaCore, Block, LARGE_SPACE, REUSE_WAIT, SMALL_SPACE,
)
from gpumem._native.bfc cimport (
    Bfc, bfc_allocate_range, bfc_free, BFC_NO_METADATA, BFC_OK, Chunk, NIL, Places, places_find,
    places_init, places_allocate, SLOT_RELEASED,
)
from gpumem._native.driver cimport context_is_dead
from gpumem._native.pages cimport Space, space_reserves, space_restore
from gpumem._support.events cimport is_recorded
from gpumem._support.lock cimport lock_acquire, lock_release


cdef bint arena_places_init(ArenaCore* arena, Places* places, const uint64_t* edges,
                            uint32_t edge_count) noexcept nogil:
    # All of it is free for every stream: the region is new, and has not been used.
    cdef uint32_t first
    caches_flush(arena)
    complete_streams(arena)
    first = arena.table.regions[0].first
    return places_init(places, arena.table.chunks[first].address, edges, edge_count, first)


cdef int arena_place_fast(ArenaCore* arena, Places* places, uint32_t begin, uint32_t end,
                          uint64_t requested, uint32_t stream_slot, Block* block) noexcept nogil:
    cdef int status = ARENA_MISS
    if context_is_dead(arena.context):
        return ARENA_DEAD
    lock_acquire(&arena.lock)
    # A switch that needs an event is left to the slow path, which may call the driver.
    if not (arena.last_stream != stream_slot and switch_needs_event(arena)):
        arena.last_stream = stream_slot
        status = allocate_now(arena, places, begin, end, requested, stream_slot, block)
    lock_release(&arena.lock)
    return noted(arena, status, requested, stream_slot, block)


cdef int arena_place_slow(ArenaCore* arena, Places* places, uint32_t begin, uint32_t end,
                          uint64_t requested, uint32_t stream_slot, Block* block) noexcept nogil:
    # In the order of arena_allocate_slow: event, poll, wait on the device. Nothing is flushed or
    # grown, because no cache and no other region may have the place.
    cdef int status
    switch_stream(arena, stream_slot)
    status = arena_place_fast(arena, places, begin, end, requested, stream_slot, block)
    if status == ARENA_MISS and release_completed(arena, stream_slot):
        status = arena_place_fast(arena, places, begin, end, requested, stream_slot, block)
    if status == ARENA_MISS and arena.settings.reuse == REUSE_WAIT:
        lock_acquire(&arena.lock)
        status = allocate_behind(arena, places, begin, end, requested, stream_slot, block)
        lock_release(&arena.lock)
        noted(arena, status, requested, stream_slot, block)
    return status


cdef int arena_allocate_range(ArenaCore* arena, uint64_t address, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, Block* block) noexcept nogil:
    cdef int status = BFC_OK
    cdef uint32_t index = NIL
    cdef Bfc* table = &arena.table
    cdef Space* space = &arena.spaces[LARGE_SPACE]
    cdef bint backed = True
    lock_acquire(&arena.lock)
    if arena.settings.paged:
        if space_reserves(&arena.spaces[SMALL_SPACE], address, size):
            table = &arena.small
            space = &arena.spaces[SMALL_SPACE]
        backed = (space_reserves(space, address, size)
                  and space_restore(space, address, address + size))
    if backed:
        index = bfc_allocate_range(table, address, size, requested, stream_slot, &status)
    if index != NIL:
        finish_allocate(arena, NULL, table, index, block)
    lock_release(&arena.lock)
    if index != NIL:
        return noted(arena, ARENA_OK, requested, stream_slot, block)
    return ARENA_NO_METADATA if status == BFC_NO_METADATA else ARENA_STALE


cdef inline int noted(ArenaCore* arena, int status, uint64_t requested, uint32_t stream_slot,
                      const Block* block) noexcept nogil:
    if status == ARENA_OK and is_recorded(&arena.events):
        note_allocate(arena, requested, stream_slot, block)
    return status


cdef int allocate_now(ArenaCore* arena, Places* places, uint32_t begin, uint32_t end,
                      uint64_t requested, uint32_t stream_slot, Block* block) noexcept nogil:
    # With the lock: allocates at the planned offset if the stream may have it.
    cdef uint32_t index
    if not arena_is_open(arena):
        return ARENA_CLOSED
    index = places_find(places, &arena.table, begin, end)
    if index == NIL or not may_have(arena, index, stream_slot):
        return ARENA_MISS
    return allocate_chunk(arena, places, index, begin, end, requested, stream_slot, block)


cdef inline bint may_have(const ArenaCore* arena, uint32_t index,
                          uint32_t stream_slot) noexcept nogil:
    cdef const Chunk* chunk = &arena.table.chunks[index]
    return chunk.stream_slot == stream_slot or chunk.stream_slot == SLOT_RELEASED


cdef int allocate_chunk(ArenaCore* arena, Places* places, uint32_t index, uint32_t begin,
                        uint32_t end, uint64_t requested, uint32_t stream_slot,
                        Block* block) noexcept nogil:
    index = places_allocate(places, &arena.table, index, begin, end, requested, stream_slot)
    if index == NIL:
        return ARENA_NO_METADATA
    # No cache: a cached block would block its offset for the next one planned there.
    finish_allocate(arena, NULL, &arena.table, index, block)
    return ARENA_OK


cdef int allocate_behind(ArenaCore* arena, Places* places, uint32_t begin, uint32_t end,
                         uint64_t requested, uint32_t stream_slot, Block* block) noexcept nogil:
    # With the lock: allocates memory that one other stream freed, behind a wait on the device.
    cdef uint32_t index = places_find(places, &arena.table, begin, end)
    cdef uint32_t other
    cdef uint64_t epoch
    if index == NIL:
        return ARENA_MISS
    other = arena.table.chunks[index].stream_slot
    epoch = arena.table.chunks[index].epoch
    if not cover_epoch(arena, other, epoch):
        return ARENA_MISS
    index = places_find(places, &arena.table, begin, end)   # the lock was released meanwhile
    if index == NIL or not arena_is_open(arena):
        return ARENA_MISS
    # Still the memory that the event covers? Else it may be free for another reason.
    if arena.table.chunks[index].stream_slot != other or arena.table.chunks[index].epoch > epoch:
        return allocate_now(arena, places, begin, end, requested, stream_slot, block)
    epoch = arena.table.chunks[index].epoch
    index = places_allocate(places, &arena.table, index, begin, end, requested, stream_slot)
    if index == NIL:
        return ARENA_NO_METADATA
    # Only for memory that no other thread can take any more, see streams.
    if not wait_behind(arena, other, epoch, stream_slot):
        bfc_free(&arena.table, index, other, epoch)
        return ARENA_MISS
    finish_allocate(arena, NULL, &arena.table, index, block)
    return ARENA_OK

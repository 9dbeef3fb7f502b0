"""Allocation and free without a driver call.

A block of exactly this size and stream comes from the thread's cache, without the arena's lock;
else a search of the table finds a block, under the lock, or a larger one leaves the thread's cache
for the table and is split. Where there is none, slow_path goes on.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.allocation_events cimport note_allocate, note_free
from gpumem._native.arena.bookkeeping cimport (
    charge_padding, charge_request, count_out, counted_bytes, finish_allocate, table_free,
)
from gpumem._native.arena.debug_heap.heap cimport heap_free
from gpumem._native.arena.release cimport release_retired, release_waiting
from gpumem._native.arena.streams cimport free_later, switch_needs_event
from gpumem._native.arena.family cimport tag_now
from gpumem._native.arena.thread_cache cimport (
    cache_allocate, cache_find, cache_free, cache_free_fitting, cache_free_last, cache_make,
    cache_may_have, cache_publish,
)
from gpumem._native.arena.types cimport (
    ARENA_DEAD, arena_is_open, ARENA_MISS, ARENA_OK, ARENA_OVER_BUDGET, ARENA_STALE, ARENA_TAGGED,
    ArenaCore, Block, IN_SMALL, table_for, table_of, ThreadCache, unlikely,
)
from gpumem._native.bfc cimport Bfc, bfc_allocate, BFC_OK, bfc_resolve, NIL, round_to_quantum
from gpumem._native.driver cimport (
    context_is_dead, context_relax, context_restore, CUstreamCaptureMode,
)
from gpumem._support.atomics cimport count_now
from gpumem._support.events cimport is_recorded
from gpumem._support.interpreter cimport interpreter_release, interpreter_restore, PyThreadState
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport lock_acquire, lock_release, lock_try, owner_enter, owner_leave


cdef int arena_allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                             Block* block) noexcept nogil:
    # In a fork's child: metadata may be as a thread of the parent's was changing it.
    if context_is_dead(arena.context):
        return ARENA_DEAD
    if unlikely(count_now(&arena.detour) or is_recorded(&arena.events)):
        return allocate_detoured(arena, nbytes, stream_slot, block)
    return allocate_fast(arena, nbytes, stream_slot, block)


cdef int allocate_detoured(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                           Block* block) noexcept nogil:
    cdef int status
    if not count_now(&arena.detour):
        status = allocate_fast(arena, nbytes, stream_slot, block)       # recorded, and no more
    elif tag_now(arena) != NULL:
        return ARENA_TAGGED
    elif arena.heap != NULL or arena.settings.passthrough or not arena_is_open(arena):
        return ARENA_MISS
    elif arena.in_use_level == NULL:
        status = allocate_fast(arena, nbytes, stream_slot, block)       # another thread's tag
    elif not charge_request(arena, nbytes):
        return ARENA_OVER_BUDGET
    else:
        status = allocate_fast(arena, nbytes, stream_slot, block)
        status = arena_charge_block(arena, nbytes, stream_slot, status, block)
    if is_recorded(&arena.events) and status == ARENA_OK:
        note_allocate(arena, nbytes, stream_slot, block)
    return status


cdef int allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
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
    # Again, with the lock. An event that is due needs the driver: that is the slow path's.
    if (arena_is_open(arena)
            and not (arena.last_stream != stream_slot and switch_needs_event(arena))):
        arena.last_stream = stream_slot
        # Published before the table changes, so that the peak is exact. The block freed last goes
        # to the table under the same lock, so that this search may use it.
        cache_publish(arena, cache)
        cache_free_last(arena, cache)
        table = table_for(arena, nbytes)
        index = bfc_allocate(table, size, nbytes, stream_slot, &status)
        # A larger block that this thread has cached costs less than what the slow path does.
        if (index == NIL and status == BFC_OK
                and cache_free_fitting(arena, cache, size, stream_slot)):
            index = bfc_allocate(table, size, nbytes, stream_slot, &status)
        if index != NIL:
            finish_allocate(arena, cache, table, index, block)
    lock_release(&arena.lock)
    owner_leave(&cache.lock)
    return ARENA_OK if index != NIL else ARENA_MISS


cdef int arena_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    if unlikely(count_now(&arena.detour) or is_recorded(&arena.events)):
        return free_detoured(arena, handle, stream_slot)
    return block_free(arena, handle, stream_slot)


cdef int free_detoured(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    cdef uint64_t counted
    cdef int status
    if is_recorded(&arena.events) and arena.heap == NULL:
        note_free(arena, handle, stream_slot)   # before: the next owner's event comes after it
    if not count_now(&arena.detour):
        return block_free(arena, handle, stream_slot)
    if arena.heap != NULL:
        return heap_free(arena, handle, stream_slot, NULL)
    # Read before the free, after which the handle is stale.
    counted = counted_bytes(arena, handle)
    status = block_free_uncharged(arena, handle, stream_slot)
    if status == ARENA_OK:
        count_out(arena, counted)
    return status


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


cdef int arena_free_used(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                         Uses* uses) noexcept nogil:
    cdef bint pending
    cdef uint64_t counted
    if arena.heap != NULL:
        return heap_free(arena, handle, stream_slot, uses)
    counted = counted_bytes(arena, handle)
    lock_acquire(&arena.lock)
    pending = free_later(arena, handle, stream_slot, uses)
    lock_release(&arena.lock)
    # Every recorded use is on the stream of the free, or drained: an ordinary free.
    if not pending:
        return arena_free(arena, handle, stream_slot)
    count_out(arena, counted)
    return ARENA_OK


cdef int arena_charge_block(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, int status,
                            Block* block) noexcept nogil:
    # What was charged before the block was looked for goes back unless it is handed out.
    if status == ARENA_OK and not charge_padding(arena, nbytes, block):
        block_free_uncharged(arena, block.handle, stream_slot)
        status = ARENA_OVER_BUDGET
    if status != ARENA_OK:
        count_out(arena, round_to_quantum(nbytes))
    return status


cdef int block_free_uncharged(ArenaCore* arena, uint64_t handle,
                              uint32_t stream_slot) noexcept nogil:
    # A block that is not charged, or no longer.
    if arena.settings.passthrough:
        return block_free_through(arena, handle, stream_slot)
    return block_free(arena, handle, stream_slot)


cdef int block_free_through(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    cdef PyThreadState* interpreter
    cdef CUstreamCaptureMode mode
    cdef int status
    status = block_free_locked(arena, NULL, handle, stream_slot)
    if status != ARENA_OK or context_is_dead(arena.context):
        return status
    # A source that has the grow lock may wait for the interpreter lock, which a finalizer holds:
    # then the region is released by the next call. For pinned and managed memory the driver waits
    # for all work of the device.
    if lock_try(&arena.grow_lock):
        interpreter = interpreter_release()
        mode = context_relax(arena.context)
        release_retired(arena)
        release_waiting(arena)
        lock_release(&arena.grow_lock)
        context_restore(arena.context, mode)
        interpreter_restore(interpreter)
    return status

"""Detours of allocation and free from the fast path."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.bookkeeping cimport (
    charge_padding, charge_request, count_out, counted_bytes, note_allocate, note_free,
)
from gpumem._native.arena.debug_heap.heap cimport heap_free
from gpumem._native.arena.family cimport tag_now
from gpumem._native.arena.fast_path cimport block_allocate, block_free, block_free_locked
from gpumem._native.arena.release cimport release_retired, release_waiting
from gpumem._native.arena.streams cimport free_later
from gpumem._native.arena.types cimport (
    arena_is_open, ARENA_MISS, ARENA_OK, ARENA_OVER_BUDGET, ARENA_TAGGED, ArenaCore, Block,
)
from gpumem._native.bfc cimport round_to_quantum
from gpumem._native.driver cimport (
    context_is_dead, context_relax, context_restore, CUstreamCaptureMode,
)
from gpumem._support.atomics cimport count_now
from gpumem._support.events cimport is_recorded
from gpumem._support.interpreter cimport interpreter_release, interpreter_restore, PyThreadState
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport lock_acquire, lock_release, lock_try


cdef int allocate_detoured(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                           Block* block) noexcept nogil:
    cdef int status
    if not count_now(&arena.detour):
        status = block_allocate(arena, nbytes, stream_slot, block)       # only recorded
    elif tag_now(arena) != NULL:
        return ARENA_TAGGED
    elif arena.heap != NULL or arena.settings.passthrough or not arena_is_open(arena):
        return ARENA_MISS
    elif arena.in_use_level == NULL:
        status = block_allocate(arena, nbytes, stream_slot, block)       # another context's tag
    elif not charge_request(arena, nbytes):
        return ARENA_OVER_BUDGET
    else:
        status = block_allocate(arena, nbytes, stream_slot, block)
        status = arena_charge_block(arena, nbytes, stream_slot, status, block)
    if is_recorded(&arena.events) and status == ARENA_OK:
        note_allocate(arena, nbytes, stream_slot, block)
    return status


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
    # Undo the charge of the request unless a block is returned.
    if status == ARENA_OK and not charge_padding(arena, nbytes, block):
        block_free_uncharged(arena, block.handle, stream_slot)
        status = ARENA_OVER_BUDGET
    if status != ARENA_OK:
        count_out(arena, round_to_quantum(nbytes))
    return status


cdef int block_free_uncharged(ArenaCore* arena, uint64_t handle,
                              uint32_t stream_slot) noexcept nogil:
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
        release_retired(arena, True)
        release_waiting(arena)
        lock_release(&arena.grow_lock)
        context_restore(arena.context, mode)
        interpreter_restore(interpreter)
    return status

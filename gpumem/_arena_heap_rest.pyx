"""Out of the quarantine; see _arena_heap_rest.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free

from gpumem._arena_heap_books cimport (
    finding_of,
    list_add,
    list_after,
    list_first,
    list_remove,
    note_finding,
    table_remove,
)
from gpumem._arena_heap_types cimport (
    DebugHeap,
    HEAP_FREED,
    HEAP_RESTING,
    HEAP_STREAM_GONE,
    HeapBlock,
    HeapFinding,
    HeapState,
)
from gpumem._arena_heap_zones cimport block_examine, block_lay
from gpumem._arena_parked cimport uses_let_go
from gpumem._arena_slots cimport slot_unclaim
from gpumem._arena_streams cimport drain_streams, end_epochs
from gpumem._arena_types cimport ArenaCore, STATE_OPEN, STATE_SUSPENDED
from gpumem._driver cimport (
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_ERROR_INVALID_HANDLE,
    CUDA_SUCCESS,
    CUresult,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
    place_enter,
    place_leave,
    place_relax,
    place_restore,
)
from gpumem._support.atomics cimport load32, load64
from gpumem._support.lock cimport lock_acquire, lock_release


cdef uint64_t turn_over(ArenaCore* arena, uint64_t most, bint forced) noexcept nogil:
    # `most` bytes may go on resting. `forced`: also what the driver does not let be examined.
    if arena.closed != STATE_OPEN or not holds_any(arena.heap):
        return 0
    ask_streams(arena)
    return rest_quiet(arena, most, forced) + give_oldest(arena, most, forced)


cdef uint64_t rest_quiet(ArenaCore* arena, uint64_t most, bint forced) noexcept nogil:
    # A block that would not rest for a moment is neither filled, nor does it drive out others.
    cdef HeapBlock* block = list_first(arena.heap, HEAP_FREED)
    cdef HeapBlock* following
    cdef uint64_t given = 0
    while block != NULL:
        following = list_after(arena.heap, block)
        if not is_quiet(arena, block):
            look_for_streams(arena, block)
        elif not (forced or is_done(arena, block.slot, block.epoch)):
            if block.guarded:       # whether its own stream still writes it shows then
                lay_to_rest(arena, block, forced)
        elif block.guarded and block.size <= most:
            lay_to_rest(arena, block, forced)
        elif examine(arena, block, forced):
            given += give_back(arena, block)
        block = following
    return given


cdef uint64_t give_oldest(ArenaCore* arena, uint64_t most, bint forced) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef HeapBlock* block = list_first(heap, HEAP_RESTING)
    cdef HeapBlock* following
    cdef uint64_t given = 0
    while block != NULL and heap.held[<int>HEAP_RESTING] > most:
        following = list_after(heap, block)
        if (forced or is_done(arena, block.slot, block.epoch)) and examine(arena, block, forced):
            given += give_back(arena, block)
        block = following
    return given


cdef void ask_streams(ArenaCore* arena) noexcept nogil:
    cdef CUstreamCaptureMode mode = place_relax(arena.place)
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if load32(&arena.streams[stream_slot].dirty) or arena.streams[stream_slot].event_epoch:
            end_epochs(arena, stream_slot)
    lock_release(&arena.lock)
    place_restore(arena.place, mode)


cdef inline bint is_done(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    # A stream that was reset and is not named again has been drained.
    return arena.streams[stream_slot].silent or load64(&arena.streams[stream_slot].done) >= epoch


cdef bint is_quiet(ArenaCore* arena, const HeapBlock* block) noexcept nogil:
    cdef uint32_t i
    if not is_done(arena, block.freed_slot, block.freed_epoch):
        return False
    if block.uses != NULL:
        for i in range(block.uses.count):
            if not is_done(arena, block.uses.at[i].slot, block.uses.at[i].until):
                return False
    return True


cdef void lay_to_rest(ArenaCore* arena, HeapBlock* block, bint forced) noexcept nogil:
    if not examine(arena, block, forced):
        return
    if block.guarded and block_lay(arena.heap, arena.place, block) != CUDA_SUCCESS and not forced:
        return
    lock_acquire(&arena.heap.lock)
    list_remove(arena.heap, block)
    list_add(arena.heap, block, HEAP_RESTING)
    lock_release(&arena.heap.lock)


cdef bint examine(ArenaCore* arena, const HeapBlock* block, bint forced) noexcept nogil:
    """Note what is wrong with it; False: the driver does not let it be seen."""
    return look_at(arena, block) == CUDA_SUCCESS or forced


cdef CUresult look_at(ArenaCore* arena, const HeapBlock* block) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef HeapFinding* findings = NULL
    cdef HeapFinding* following
    cdef HeapBlock seen
    cdef CUresult code
    if not block.guarded:
        return CUDA_SUCCESS
    lock_acquire(&heap.lock)
    seen = block[0]             # a free may change it while it is looked at
    lock_release(&heap.lock)
    code = block_examine(heap, arena.place, &seen, &findings)
    if findings == NULL:
        return code
    lock_acquire(&heap.lock)
    while findings != NULL:
        following = findings.next
        note_finding(heap, findings)
        findings = following
    lock_release(&heap.lock)
    heap.hooks.found()
    return code


cdef uint64_t give_back(ArenaCore* arena, HeapBlock* block) noexcept nogil:
    # Everything that was queued on its streams is done: recorded uses have ended.
    cdef DebugHeap* heap = arena.heap
    cdef uint64_t nbytes = block.size
    lock_acquire(&heap.lock)
    list_remove(heap, block)
    table_remove(heap, block)
    lock_release(&heap.lock)
    if block.uses != NULL:
        uses_let_go(arena, block.uses)
    heap.give(arena, block.handle, block.freed_slot)
    slot_unclaim(arena, block.freed_slot)
    slot_unclaim(arena, block.slot)
    free(block)
    return nbytes


cdef void drain(ArenaCore* arena) noexcept nogil:
    cdef CUstreamCaptureMode mode
    if not holds_any(arena.heap):
        return
    if arena.closed == STATE_SUSPENDED:
        # The device was drained, and there is no memory to look at.
        give_all_back(arena, HEAP_FREED)
        give_all_back(arena, HEAP_RESTING)
        return
    mode = place_relax(arena.place)
    drain_streams(arena)
    place_restore(arena.place, mode)
    turn_over(arena, 0, True)


cdef void give_all_back(ArenaCore* arena, HeapState state) noexcept nogil:
    cdef HeapBlock* block = list_first(arena.heap, state)
    while block != NULL:
        give_back(arena, block)
        block = list_first(arena.heap, state)


# ---- streams that are gone -----------------------------------------------------------------------

cdef void look_for_streams(ArenaCore* arena, HeapBlock* block) noexcept nogil:
    # One that was asked and has no event yet may be one that the driver does not know any more.
    cdef uint32_t i
    if block.orphaned:
        return
    tell_if_gone(arena, block, block.freed_slot)
    if block.uses != NULL:
        for i in range(block.uses.count):
            tell_if_gone(arena, block, block.uses.at[i].slot)


cdef void tell_if_gone(ArenaCore* arena, HeapBlock* block, uint32_t stream_slot) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef HeapFinding* finding
    if block.orphaned or arena.streams[stream_slot].event_epoch or not is_gone(arena, stream_slot):
        return
    block.orphaned = True
    lock_acquire(&heap.lock)
    finding = finding_of(block, HEAP_STREAM_GONE, <uint64_t>arena.streams[stream_slot].handle,
                         &block.freed)
    note_finding(heap, finding)
    lock_release(&heap.lock)
    heap.hooks.found()


cdef bint is_gone(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # Asking whether it captures is legal at any time.
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code = place_enter(arena.place)
    if code == CUDA_SUCCESS and arena.place.table.cuStreamIsCapturing != NULL:
        code = arena.place.table.cuStreamIsCapturing(arena.streams[stream_slot].handle, &status)
    place_leave(arena.place)
    return code == CUDA_ERROR_INVALID_HANDLE

"""Epochs and events of an arena's streams; see _arena_types.pxd for the rules."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_cache cimport caches_flush, thread_now
from gpumem._arena_parked cimport (
    free_completed,
    free_pending_behind,
    is_pending_free,
    pending_free_best,
)
from gpumem._arena_types cimport (
    ArenaCore,
    LARGE_SPACE,
    REUSE_NEVER,
    SMALL_SPACE,
    StreamSlot,
)
from gpumem._bfc cimport (
    ANY_EPOCH,
    BFC_OK,
    Bfc,
    NIL,
    bfc_has,
    bfc_release_completed,
    bfc_allocate_from,
    round_to_quantum,
)
from gpumem._driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_SUCCESS,
    CUevent,
    CUgraph,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
    Place,
    place_enter,
    place_leave,
    place_relax,
    place_restore,
    stream_captures,
)
from gpumem._lease cimport Uses
from gpumem._support.atomics cimport load32, publish64, store32, store64
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.streams cimport LEGACY_STREAM


cdef void drain_streams(ArenaCore* arena) noexcept nogil:
    # By the device: the streams' owners may have destroyed them.
    cdef bint pending = False
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if (load32(&arena.streams[stream_slot].dirty) or arena.streams[stream_slot].event_epoch
                or arena.streams[stream_slot].asking):
            pending = True
    lock_release(&arena.lock)
    if pending and place_enter(arena.place) == CUDA_SUCCESS:
        arena.place.table.cuCtxSynchronize()
        place_leave(arena.place)
    for stream_slot in range(1, arena.table.stream_slot_count):
        complete_all(arena, stream_slot)


cdef void complete_all(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    caches_flush(arena)
    lock_acquire(&arena.lock)
    stream.done = stream.epoch
    release_epochs(arena, stream_slot, stream.epoch)
    store32(&stream.dirty, False)
    publish64(&stream.epoch, stream.epoch + 1)
    stream.event_epoch = 0
    free_completed(arena)
    lock_release(&arena.lock)


cdef void release_epochs(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    # What was freed on the stream up to this epoch becomes free for everyone.
    bfc_release_completed(&arena.table, stream_slot, epoch)
    bfc_release_completed(&arena.small, stream_slot, epoch)


cdef bint switch_needs_event(const ArenaCore* arena) noexcept nogil:
    cdef const StreamSlot* before = &arena.streams[arena.last_stream]
    return (load32(&before.dirty) and before.event_epoch == 0 and not before.asking
            and arena.settings.reuse != REUSE_NEVER)


cdef void switch_stream(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    lock_acquire(&arena.lock)
    if arena.last_stream != stream_slot and switch_needs_event(arena):
        close_epoch(arena, arena.last_stream)
    arena.last_stream = stream_slot
    lock_release(&arena.lock)


cdef void close_epoch(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # With the lock, given up for the driver. Records an event behind everything that was queued
    # on the stream when its blocks were freed; later frees belong to the next epoch.
    cdef uint64_t epoch = arena.streams[stream_slot].epoch
    cdef CUstream handle = arena.streams[stream_slot].handle
    cdef CUevent event = arena.streams[stream_slot].event
    cdef CUresult code
    if arena.streams[stream_slot].silent:
        return
    if (arena.streams[stream_slot].thread != NULL
            and arena.streams[stream_slot].thread != thread_now()):
        # Another thread's default stream cannot be named here; the legacy stream waits for it.
        handle = <CUstream><uint64_t>LEGACY_STREAM
    # `dirty` before the epoch, the opposite of a free, which reads the epoch and then sets `dirty`:
    # no free of the new epoch goes unnoticed.
    store32(&arena.streams[stream_slot].dirty, False)
    publish64(&arena.streams[stream_slot].epoch, arena.streams[stream_slot].epoch + 1)
    arena.streams[stream_slot].asking = True
    lock_release(&arena.lock)
    # The driver is called without the lock: it may block behind another thread's call.
    code = record_event(arena.place, handle, &event)
    lock_acquire(&arena.lock)
    arena.streams[stream_slot].asking = False
    arena.streams[stream_slot].event = event
    if code == CUDA_SUCCESS:
        arena.streams[stream_slot].event_epoch = epoch
        arena.stats.events_recorded += 1
    else:
        # still unknown: the next event covers it too
        store32(&arena.streams[stream_slot].dirty, True)


cdef CUresult record_event(Place* place, CUstream stream, CUevent* event) noexcept nogil:
    # Never into a capture: the event would become a part of the graph and never complete.
    cdef uint64_t capture
    cdef CUgraph graph
    cdef bint unknown
    cdef CUresult code
    if stream_captures(place, stream, &capture, &graph, &unknown) or unknown:
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    if event[0] == NULL:
        code = place.table.cuEventCreate(event, CU_EVENT_DISABLE_TIMING)
    if code == CUDA_SUCCESS:
        code = place.table.cuEventRecord(event[0], stream)
    place_leave(place)
    return code


cdef bint release_completed(ArenaCore* arena, uint32_t taker) noexcept nogil:
    cdef bint completed = False
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if is_worth_asking(arena, stream_slot, taker) and end_epochs(arena, stream_slot):
            completed = True
    if arena.pending_free != NULL and free_completed(arena):
        completed = True
    lock_release(&arena.lock)
    return completed


cdef bint is_worth_asking(const ArenaCore* arena, uint32_t stream_slot,
                          uint32_t taker) noexcept nogil:
    # Under "never" no stream's blocks settle, but those that wait for it go back to their own.
    if arena.streams[stream_slot].guards:
        return True
    return arena.settings.reuse != REUSE_NEVER and stream_slot != taker and (
        has_free(arena, stream_slot) or dormant_views_wait(arena, stream_slot))


cdef inline bint dormant_views_wait(const ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # All that was freed on the stream is in use again; views from before a move may wait for it.
    return (arena.spaces[LARGE_SPACE].moved + arena.spaces[SMALL_SPACE].moved != 0
            and (load32(&arena.streams[stream_slot].dirty)
                 or arena.streams[stream_slot].event_epoch != 0))


cdef bint end_epochs(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # An event from the last switch first; then one behind what was freed since.
    if arena.streams[stream_slot].asking or arena.streams[stream_slot].silent:
        return False
    if arena.streams[stream_slot].event_epoch and not ask_event(arena, stream_slot):
        return False
    if load32(&arena.streams[stream_slot].dirty) and not arena.streams[stream_slot].asking:
        close_epoch(arena, stream_slot)
        if arena.streams[stream_slot].event_epoch:
            ask_event(arena, stream_slot)
    return True


cdef inline bint has_free(const ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    return (arena.table.bins[stream_slot].free_chunks != 0
            or arena.small.bins[stream_slot].free_chunks != 0)


cdef bint ask_event(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # With the lock, given up for the driver.
    cdef uint64_t epoch = arena.streams[stream_slot].event_epoch
    cdef CUevent event = arena.streams[stream_slot].event
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    arena.streams[stream_slot].asking = True
    lock_release(&arena.lock)
    code = place_enter(arena.place)
    if code == CUDA_SUCCESS:
        mode = place_relax(arena.place)
        code = arena.place.table.cuEventQuery(event)
        place_restore(arena.place, mode)
        place_leave(arena.place)
    lock_acquire(&arena.lock)
    arena.streams[stream_slot].asking = False
    arena.stats.events_asked += 1
    if code != CUDA_SUCCESS:
        return False
    if arena.streams[stream_slot].event_epoch == epoch:
        arena.streams[stream_slot].event_epoch = 0
    # Another thread may have polled a later event while the lock was given up.
    if epoch > arena.streams[stream_slot].done:
        arena.streams[stream_slot].done = epoch
        store64(&arena.completions, arena.completions + 1)
    if epoch > arena.table.bins[stream_slot].completed and arena.settings.reuse != REUSE_NEVER:
        release_epochs(arena, stream_slot, epoch)
    return True


cdef uint32_t allocate_behind(ArenaCore* arena, Bfc* table, uint64_t nbytes,
                              uint32_t taker) noexcept nogil:
    cdef uint64_t size = round_to_quantum(nbytes)
    cdef uint32_t index = NIL
    cdef uint32_t stream_slot
    cdef int status = BFC_OK
    for stream_slot in range(1, arena.table.stream_slot_count):
        if stream_slot == taker or arena.streams[stream_slot].asking or not bfc_has(table, size,
                                                                                    stream_slot):
            continue
        # An event must lie behind the frees before anything can wait for it.
        if load32(&arena.streams[stream_slot].dirty):
            close_epoch(arena, stream_slot)
        if arena.streams[stream_slot].event_epoch and enqueue_wait(arena, stream_slot, taker):
            index = bfc_allocate_from(table, size, nbytes, stream_slot,
                                      arena.streams[stream_slot].event_epoch, taker, &status)
            if index != NIL:
                break
    if index == NIL and arena.pending_free != NULL and free_best_behind(arena, table, size, taker):
        index = bfc_allocate_from(table, size, nbytes, taker, <uint64_t>ANY_EPOCH, taker, &status)
    return index


cdef bint free_best_behind(ArenaCore* arena, Bfc* table, uint64_t size,
                           uint32_t taker) noexcept nogil:
    # A parked block becomes the taker's, whose stream waits for everything that uses it.
    cdef Uses* uses = pending_free_best(arena, table, size)
    cdef uint64_t handle
    cdef uint32_t i = 0
    if uses == NULL:
        return False
    handle = uses.handle
    if not order_behind(arena, uses.stream_slot, uses.epoch, taker):
        return False
    # Each wait gives the lock up, so the block may have been freed or taken by another thread:
    # look whether it is still pending before each step.
    while is_pending_free(arena, uses, handle):
        if i == uses.count:
            free_pending_behind(arena, uses, taker)
            return True
        if not order_behind(arena, uses.at[i].slot, uses.at[i].until, taker):
            return False
        i += 1
    return False


cdef bint order_behind(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch,
                       uint32_t taker) noexcept nogil:
    if stream_slot == taker or arena.streams[stream_slot].done >= epoch:
        return True
    if arena.streams[stream_slot].asking:
        return False
    if arena.streams[stream_slot].epoch == epoch:
        close_epoch(arena, stream_slot)
    return arena.streams[stream_slot].event_epoch >= epoch and enqueue_wait(arena, stream_slot,
                                                                            taker)


cdef void wait_for_others(ArenaCore* arena, uint32_t taker) noexcept nogil:
    cdef uint32_t stream_slot
    for stream_slot in range(1, arena.table.stream_slot_count):
        if stream_slot == taker or arena.streams[stream_slot].asking or not has_free(arena,
                                                                                     stream_slot):
            continue
        if load32(&arena.streams[stream_slot].dirty):
            close_epoch(arena, stream_slot)
        if arena.streams[stream_slot].event_epoch and enqueue_wait(arena, stream_slot, taker):
            arena.table.bins[stream_slot].waited = arena.streams[stream_slot].event_epoch
            arena.small.bins[stream_slot].waited = arena.streams[stream_slot].event_epoch


cdef void forget_waits(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    for stream_slot in range(1, arena.table.stream_slot_count):
        arena.table.bins[stream_slot].waited = 0
        arena.small.bins[stream_slot].waited = 0


cdef bint enqueue_wait(ArenaCore* arena, uint32_t stream_slot, uint32_t taker) noexcept nogil:
    # With the lock, given up for the driver; `asking` keeps others from recording the event anew.
    cdef CUevent event = arena.streams[stream_slot].event
    cdef CUstream stream = arena.streams[taker].handle
    cdef CUresult code
    arena.streams[stream_slot].asking = True
    lock_release(&arena.lock)
    code = place_enter(arena.place)
    if code == CUDA_SUCCESS:
        code = arena.place.table.cuStreamWaitEvent(stream, event, 0)
        place_leave(arena.place)
    lock_acquire(&arena.lock)
    arena.streams[stream_slot].asking = False
    arena.stats.events_waited += 1
    return code == CUDA_SUCCESS


cdef void destroy_events(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    if place_enter(arena.place) != CUDA_SUCCESS:
        return
    for stream_slot in range(1, arena.table.stream_slot_count):
        if arena.streams[stream_slot].event != NULL:
            if arena.place.table.cuEventDestroy(arena.streams[stream_slot].event) != CUDA_SUCCESS:
                continue
            arena.streams[stream_slot].event = NULL
            arena.streams[stream_slot].event_epoch = 0
    place_leave(arena.place)

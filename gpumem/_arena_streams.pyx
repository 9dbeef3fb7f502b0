"""Epochs and events of an arena's streams; see _arena_types.pxd for the rules."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memset

from gpumem._arena_cache cimport caches_flush
from gpumem._arena_types cimport (
    ARENA_NO_METADATA,
    ARENA_OK,
    ArenaCore,
    LEGACY_STREAM,
    MAX_STREAMS,
    REUSE_NEVER,
    StreamSlot,
    gm_next_epoch,
    lock_acquire,
    lock_release,
)
from gpumem._bfc cimport (
    BFC_OK,
    Bfc,
    CHUNK_USED,
    NIL,
    bfc_add_lane,
    bfc_has,
    bfc_release_settled,
    bfc_take_from,
    load32,
    round_to_quantum,
    store32,
)
from gpumem._driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CUDA_SUCCESS,
    CUevent,
    CUresult,
    CUstream,
    Place,
    place_enter,
    place_leave,
)

cdef extern from "reserved.h" nogil:
    void* reserved_open(size_t nbytes)
    int reserved_commit(void* base, size_t nbytes)
    void reserved_close(void* base, size_t nbytes)

cdef extern from *:
    """
    #include <unistd.h>
    #include <sys/syscall.h>
    static inline int32_t gm_thread_id(void) { return (int32_t)syscall(SYS_gettid); }
    """
    int32_t gm_thread_id() noexcept nogil

cdef enum:
    PER_THREAD_STREAM = 2


cdef int arena_stream(ArenaCore* arena, CUstream handle, uint32_t* slot) noexcept nogil:
    cdef int32_t thread = 0
    cdef uint32_t i
    cdef int status
    if <uint64_t>handle == 0:
        handle = <CUstream><uint64_t>LEGACY_STREAM
    elif <uint64_t>handle == PER_THREAD_STREAM:
        thread = gm_thread_id()
    lock_acquire(&arena.lock)
    for i in range(1, arena.table.lane_count):
        if arena.streams[i].handle == handle and arena.streams[i].thread == thread:
            slot[0] = i
            lock_release(&arena.lock)
            return ARENA_OK
    status = add_stream(arena, handle, thread, slot)
    lock_release(&arena.lock)
    return status


cdef int add_stream(ArenaCore* arena, CUstream handle, int32_t thread,
                    uint32_t* slot) noexcept nogil:
    if arena.table.lane_count >= arena.stream_capacity and not streams_grow(arena):
        return ARENA_NO_METADATA
    # A lane that only one table got is found again by the next try; see the loops below.
    if (arena.small.lane_count <= arena.table.lane_count
            and bfc_add_lane(&arena.small, slot) != BFC_OK):
        return ARENA_NO_METADATA
    if bfc_add_lane(&arena.table, slot) != BFC_OK:
        return ARENA_NO_METADATA
    memset(&arena.streams[slot[0]], 0, sizeof(StreamSlot))
    arena.streams[slot[0]].handle = handle
    arena.streams[slot[0]].thread = thread
    arena.streams[slot[0]].epoch = 1
    return ARENA_OK


cdef bint streams_grow(ArenaCore* arena) noexcept nogil:
    cdef uint32_t capacity = arena.stream_capacity * 2 if arena.stream_capacity else 64
    if capacity > MAX_STREAMS:
        return False
    if arena.streams == NULL:
        arena.streams = <StreamSlot*>reserved_open(MAX_STREAMS * sizeof(StreamSlot))
    if (arena.streams == NULL
            or reserved_commit(arena.streams, capacity * sizeof(StreamSlot)) != 0):
        return False
    arena.stream_capacity = capacity
    return True


cdef void streams_free(ArenaCore* arena) noexcept nogil:
    reserved_close(arena.streams, MAX_STREAMS * sizeof(StreamSlot))


cdef void arena_reset_stream(ArenaCore* arena, uint32_t slot) noexcept nogil:
    cdef StreamSlot* stream
    caches_flush(arena)
    lock_acquire(&arena.lock)
    stream = &arena.streams[slot]
    settle(arena, slot, stream.epoch)
    store32(&stream.dirty, False)
    gm_next_epoch(&stream.epoch)
    stream.event_epoch = 0
    lock_release(&arena.lock)


cdef void drain_streams(ArenaCore* arena) noexcept nogil:
    # By the device: the streams' owners may have destroyed them.
    cdef bint pending = False
    cdef uint32_t slot
    lock_acquire(&arena.lock)
    for slot in range(1, arena.table.lane_count):
        if (load32(&arena.streams[slot].dirty) or arena.streams[slot].event_epoch
                or arena.streams[slot].asking):
            pending = True
    lock_release(&arena.lock)
    if pending and place_enter(arena.place) == CUDA_SUCCESS:
        arena.place.table.cuCtxSynchronize()
        place_leave(arena.place)
    for slot in range(1, arena.table.lane_count):
        arena_reset_stream(arena, slot)


cdef bint arena_stream_is_used(ArenaCore* arena, uint32_t slot) noexcept nogil:
    cdef bint used
    lock_acquire(&arena.lock)
    used = lane_is_used(&arena.table, slot) or lane_is_used(&arena.small, slot)
    lock_release(&arena.lock)
    return used


cdef bint lane_is_used(const Bfc* table, uint32_t lane) noexcept nogil:
    cdef uint32_t index
    for index in range(table.count):
        if table.chunks[index].state == CHUNK_USED and table.chunks[index].lane == lane:
            return True
    return False


cdef void settle(ArenaCore* arena, uint32_t slot, uint64_t epoch) noexcept nogil:
    # What was freed on the stream up to this epoch becomes free for everyone.
    bfc_release_settled(&arena.table, slot, epoch)
    bfc_release_settled(&arena.small, slot, epoch)


cdef bint switch_needs_event(const ArenaCore* arena) noexcept nogil:
    cdef const StreamSlot* before = &arena.streams[arena.last_stream]
    return (load32(&before.dirty) and before.event_epoch == 0 and not before.asking
            and arena.settings.reuse != REUSE_NEVER)


cdef void switch_stream(ArenaCore* arena, uint32_t stream) noexcept nogil:
    lock_acquire(&arena.lock)
    if arena.last_stream != stream and switch_needs_event(arena):
        close_epoch(arena, arena.last_stream)
    arena.last_stream = stream
    lock_release(&arena.lock)


cdef void close_epoch(ArenaCore* arena, uint32_t slot) noexcept nogil:
    # With the lock, given up for the driver. Records an event behind everything that was queued
    # on the stream when its blocks were freed; later frees belong to the next epoch.
    cdef uint64_t epoch = arena.streams[slot].epoch
    cdef CUstream handle = arena.streams[slot].handle
    cdef CUevent event = arena.streams[slot].event
    cdef CUresult code
    if arena.streams[slot].thread and arena.streams[slot].thread != gm_thread_id():
        # Another thread's default stream cannot be named here; the legacy stream waits for it.
        handle = <CUstream><uint64_t>LEGACY_STREAM
    store32(&arena.streams[slot].dirty, False)
    gm_next_epoch(&arena.streams[slot].epoch)
    arena.streams[slot].asking = True
    lock_release(&arena.lock)
    code = record_event(arena.place, handle, &event)
    lock_acquire(&arena.lock)
    arena.streams[slot].asking = False
    arena.streams[slot].event = event
    if code == CUDA_SUCCESS:
        arena.streams[slot].event_epoch = epoch
        arena.stats.events_recorded += 1
    else:
        store32(&arena.streams[slot].dirty, True)   # still unknown: the next event covers it too


cdef CUresult record_event(Place* place, CUstream stream, CUevent* event) noexcept nogil:
    cdef CUresult code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    if event[0] == NULL:
        code = place.table.cuEventCreate(event, CU_EVENT_DISABLE_TIMING)
    if code == CUDA_SUCCESS:
        code = place.table.cuEventRecord(event[0], stream)
    place_leave(place)
    return code


cdef bint settle_streams(ArenaCore* arena, uint32_t taker) noexcept nogil:
    cdef bint settled = False
    cdef uint32_t slot
    lock_acquire(&arena.lock)
    for slot in range(1, arena.table.lane_count):
        if slot == taker or not has_free(arena, slot) or arena.streams[slot].asking:
            continue
        # An event from the last switch first; then one behind what was freed since.
        if arena.streams[slot].event_epoch and not ask_event(arena, slot):
            continue
        if load32(&arena.streams[slot].dirty) and not arena.streams[slot].asking:
            close_epoch(arena, slot)
            if arena.streams[slot].event_epoch:
                ask_event(arena, slot)
        settled = True
    lock_release(&arena.lock)
    return settled


cdef inline bint has_free(const ArenaCore* arena, uint32_t slot) noexcept nogil:
    return (arena.table.lanes[slot].free_chunks != 0 or arena.small.lanes[slot].free_chunks != 0)


cdef bint ask_event(ArenaCore* arena, uint32_t slot) noexcept nogil:
    # With the lock, given up for the driver.
    cdef uint64_t epoch = arena.streams[slot].event_epoch
    cdef CUevent event = arena.streams[slot].event
    cdef CUresult code
    arena.streams[slot].asking = True
    lock_release(&arena.lock)
    code = place_enter(arena.place)
    if code == CUDA_SUCCESS:
        code = arena.place.table.cuEventQuery(event)
        place_leave(arena.place)
    lock_acquire(&arena.lock)
    arena.streams[slot].asking = False
    arena.stats.events_asked += 1
    if code != CUDA_SUCCESS:
        return False
    if arena.streams[slot].event_epoch == epoch:
        arena.streams[slot].event_epoch = 0
    if epoch > arena.table.lanes[slot].settled:
        settle(arena, slot, epoch)
    return True


cdef uint32_t take_behind(ArenaCore* arena, Bfc* table, uint64_t nbytes,
                          uint32_t taker) noexcept nogil:
    cdef uint64_t size = round_to_quantum(nbytes)
    cdef uint32_t index = NIL
    cdef uint32_t slot
    cdef int status = BFC_OK
    for slot in range(1, arena.table.lane_count):
        if slot == taker or arena.streams[slot].asking or not bfc_has(table, size, slot):
            continue
        if load32(&arena.streams[slot].dirty):
            close_epoch(arena, slot)
        if arena.streams[slot].event_epoch and enqueue_wait(arena, slot, taker):
            index = bfc_take_from(table, size, nbytes, slot,
                                  arena.streams[slot].event_epoch, taker, &status)
            if index != NIL:
                break
    return index


cdef void wait_for_others(ArenaCore* arena, uint32_t taker) noexcept nogil:
    cdef uint32_t slot
    for slot in range(1, arena.table.lane_count):
        if slot == taker or arena.streams[slot].asking or not has_free(arena, slot):
            continue
        if load32(&arena.streams[slot].dirty):
            close_epoch(arena, slot)
        if arena.streams[slot].event_epoch and enqueue_wait(arena, slot, taker):
            arena.table.lanes[slot].waited = arena.streams[slot].event_epoch
            arena.small.lanes[slot].waited = arena.streams[slot].event_epoch


cdef void forget_waits(ArenaCore* arena) noexcept nogil:
    cdef uint32_t slot
    for slot in range(1, arena.table.lane_count):
        arena.table.lanes[slot].waited = 0
        arena.small.lanes[slot].waited = 0


cdef bint enqueue_wait(ArenaCore* arena, uint32_t slot, uint32_t taker) noexcept nogil:
    # With the lock, given up for the driver; `asking` keeps others from recording the event anew.
    cdef CUevent event = arena.streams[slot].event
    cdef CUstream stream = arena.streams[taker].handle
    cdef CUresult code
    arena.streams[slot].asking = True
    lock_release(&arena.lock)
    code = place_enter(arena.place)
    if code == CUDA_SUCCESS:
        code = arena.place.table.cuStreamWaitEvent(stream, event, 0)
        place_leave(arena.place)
    lock_acquire(&arena.lock)
    arena.streams[slot].asking = False
    arena.stats.events_waited += 1
    return code == CUDA_SUCCESS


cdef void destroy_events(ArenaCore* arena) noexcept nogil:
    cdef uint32_t slot
    if place_enter(arena.place) != CUDA_SUCCESS:
        return
    for slot in range(1, arena.table.lane_count):
        if arena.streams[slot].event != NULL:
            arena.place.table.cuEventDestroy(arena.streams[slot].event)
            arena.streams[slot].event = NULL
            arena.streams[slot].event_epoch = 0
    place_leave(arena.place)

"""Slots of an arena's streams; see _arena_slots.pxd."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from gpumem._arena_cache cimport (
    caches_flush,
    thread_drop,
    thread_now,
    thread_retain,
)
from gpumem._arena_recorded cimport note_reset
from gpumem._arena_streams cimport end_epochs, settle_all, settle_streams
from gpumem._arena_types cimport (
    ARENA_NO_METADATA,
    ARENA_OK,
    ArenaCore,
    MAX_STREAMS,
    REUSE_NEVER,
    StreamSlot,
    ThreadMark,
)
from gpumem._bfc cimport (
    BFC_OK,
    Bfc,
    CHUNK_HOLE,
    CHUNK_UNUSED,
    LANE_RELEASED,
    bfc_add_lane,
    state_of,
)
from gpumem._driver cimport CUstream
from gpumem._lease cimport Uses, uses_add
from gpumem._support.atomics cimport count_add, load32
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.memory cimport reserved_close, reserved_commit, reserved_open
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

cdef enum:
    RECLAIM_FIRST = 32      # lanes; fewer are not worth a look


# ---- finding and making --------------------------------------------------------------------------

cdef int arena_stream(ArenaCore* arena, CUstream handle, uint32_t* slot,
                      bint* fresh) noexcept nogil:
    return name_stream(arena, handle, False, slot, fresh)


cdef int arena_claim_stream(ArenaCore* arena, CUstream handle, uint32_t* slot) noexcept nogil:
    cdef bint fresh
    return name_stream(arena, handle, True, slot, &fresh)


cdef int name_stream(ArenaCore* arena, CUstream handle, bint claim, uint32_t* slot,
                     bint* fresh) noexcept nogil:
    cdef ThreadMark* thread = NULL
    cdef int status = ARENA_OK
    fresh[0] = False
    if <uint64_t>handle == 0:
        handle = <CUstream><uint64_t>LEGACY_STREAM
    elif <uint64_t>handle == PER_THREAD_STREAM:
        thread = thread_now()
        if thread == NULL:
            return ARENA_NO_METADATA
    lock_acquire(&arena.lock)
    if not find_stream(arena, handle, thread, slot):
        if wants_reclaim(arena):
            lock_release(&arena.lock)
            reclaim(arena)
            lock_acquire(&arena.lock)
        if not find_stream(arena, handle, thread, slot):
            status = add_stream(arena, handle, thread, slot)
            fresh[0] = status == ARENA_OK
    if status == ARENA_OK:
        arena.streams[slot[0]].silent = False
        if claim:
            slot_claim(arena, slot[0])
    lock_release(&arena.lock)
    return status


cdef bint find_stream(const ArenaCore* arena, CUstream handle, const ThreadMark* thread,
                      uint32_t* slot) noexcept nogil:
    cdef uint32_t i
    for i in range(1, arena.table.lane_count):
        if arena.streams[i].handle == handle and arena.streams[i].thread == thread:
            slot[0] = i
            return True
    return False


cdef int add_stream(ArenaCore* arena, CUstream handle, ThreadMark* thread,
                    uint32_t* slot) noexcept nogil:
    if arena.vacant_slots == 0 and not add_slot(arena):
        return ARENA_NO_METADATA
    slot[0] = 1
    while not arena.streams[slot[0]].vacant:
        slot[0] += 1
    if thread != NULL:
        thread_retain(thread)
    arena.vacant_slots -= 1
    arena.streams[slot[0]].vacant = False
    arena.streams[slot[0]].handle = handle
    arena.streams[slot[0]].thread = thread
    return ARENA_OK


cdef bint add_slot(ArenaCore* arena) noexcept nogil:
    cdef uint32_t slot
    if arena.table.lane_count >= arena.stream_capacity and not streams_grow(arena):
        return False
    # A lane that only one table got is found again by the next try; loops follow the other table.
    if (arena.small.lane_count <= arena.table.lane_count
            and bfc_add_lane(&arena.small, &slot) != BFC_OK):
        return False
    if bfc_add_lane(&arena.table, &slot) != BFC_OK:
        return False
    memset(&arena.streams[slot], 0, sizeof(StreamSlot))
    arena.streams[slot].epoch = 1
    arena.streams[slot].vacant = True
    arena.vacant_slots += 1
    return True


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
    cdef uint32_t slot
    for slot in range(1, arena.table.lane_count):
        if arena.streams[slot].thread != NULL:
            thread_drop(arena.streams[slot].thread)
    reserved_close(arena.streams, MAX_STREAMS * sizeof(StreamSlot))


# ---- who else names a slot -----------------------------------------------------------------------

cdef void slot_claim(ArenaCore* arena, uint32_t slot) noexcept nogil:
    count_add(&arena.streams[slot].claims, 1)


cdef void slot_unclaim(ArenaCore* arena, uint32_t slot) noexcept nogil:
    count_add(&arena.streams[slot].claims, -1)


cdef int arena_record(ArenaCore* arena, Uses** uses, uint32_t slot) noexcept nogil:
    cdef bint added
    if not uses_add(uses, slot, &added):
        return ARENA_NO_METADATA
    if added:
        slot_claim(arena, slot)
    return ARENA_OK


# ---- vacating ------------------------------------------------------------------------------------

cdef bint arena_reset_stream(ArenaCore* arena, uint32_t slot, bint silent) noexcept nogil:
    cdef uint8_t* marked
    cdef bint vacated = False
    if arena.tap.recorder != NULL:
        note_reset(arena, slot)
    settle_all(arena, slot)
    lock_acquire(&arena.lock)
    marked = marked_lanes(arena)
    if marked != NULL and is_idle(arena, slot, marked):
        vacate(arena, slot)
        vacated = True
    elif silent:
        arena.streams[slot].silent = True
    lock_release(&arena.lock)
    free(marked)
    return vacated


cdef inline bint wants_reclaim(const ArenaCore* arena) noexcept nogil:
    return (arena.vacant_slots == 0 and arena.table.lane_count >= RECLAIM_FIRST
            and arena.table.lane_count >= arena.reclaim_at)


cdef void reclaim(ArenaCore* arena) noexcept nogil:
    # Vacates what nothing is marked with; of per-thread streams mostly those of threads that ended.
    cdef uint32_t slot
    cdef uint8_t* marked
    caches_flush(arena)
    settle_streams(arena, LANE_RELEASED)
    lock_acquire(&arena.lock)
    for slot in range(1, arena.table.lane_count):
        if has_unknown_work(arena, slot) and arena.settings.reuse != REUSE_NEVER:
            end_epochs(arena, slot)
    marked = marked_lanes(arena)
    if marked != NULL:
        for slot in range(1, arena.table.lane_count):
            if is_idle(arena, slot, marked):
                vacate(arena, slot)
    # Twice as many as are in use, so that looking costs little per stream.
    arena.reclaim_at = 2 * (arena.table.lane_count - arena.vacant_slots)
    lock_release(&arena.lock)
    free(marked)


cdef uint8_t* marked_lanes(const ArenaCore* arena) noexcept nogil:
    # One byte per lane: a chunk is marked with it. NULL: no host memory.
    cdef uint8_t* marked = <uint8_t*>calloc(arena.table.lane_count + 1, 1)
    if marked != NULL:
        mark_lanes(&arena.table, marked)
        mark_lanes(&arena.small, marked)
    return marked


cdef void mark_lanes(const Bfc* table, uint8_t* marked) noexcept nogil:
    cdef uint32_t index, state
    for index in range(table.count):
        state = state_of(table, index)
        if state != CHUNK_UNUSED and state != CHUNK_HOLE:
            marked[table.chunks[index].lane] = True


cdef inline bint has_unknown_work(const ArenaCore* arena, uint32_t slot) noexcept nogil:
    return load32(&arena.streams[slot].dirty) or arena.streams[slot].event_epoch != 0


cdef inline bint is_idle(const ArenaCore* arena, uint32_t slot,
                         const uint8_t* marked) noexcept nogil:
    cdef const StreamSlot* stream = &arena.streams[slot]
    return (not stream.vacant and not marked[slot] and stream.guards == 0 and not stream.asking
            and load32(<const uint32_t*>&stream.claims) == 0
            and not has_unknown_work(arena, slot))


cdef void vacate(ArenaCore* arena, uint32_t slot) noexcept nogil:
    # Its epochs go on, so that what is still noted of them stays true.
    cdef StreamSlot* stream = &arena.streams[slot]
    if stream.thread != NULL:
        thread_drop(stream.thread)
    stream.thread = NULL
    stream.handle = NULL
    stream.silent = False
    stream.vacant = True
    arena.vacant_slots += 1

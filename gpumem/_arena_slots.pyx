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
from gpumem._arena_streams cimport end_epochs, complete_all, release_completed
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
    SLOT_RELEASED,
    bfc_add_stream_slot,
    state_of,
)
from gpumem._driver cimport CUstream
from gpumem._lease cimport Uses, uses_add
from gpumem._support.atomics cimport count_add, load32
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.memory cimport reserved_close, reserved_commit, reserved_open
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

cdef enum:
    RECLAIM_FIRST = 32      # stream slots; fewer are not worth a look


# ---- finding and making --------------------------------------------------------------------------

cdef int arena_stream(ArenaCore* arena, CUstream handle, uint32_t* stream_slot,
                      bint* fresh) noexcept nogil:
    return name_stream(arena, handle, False, stream_slot, fresh)


cdef int arena_claim_stream(ArenaCore* arena, CUstream handle,
                            uint32_t* stream_slot) noexcept nogil:
    cdef bint fresh
    return name_stream(arena, handle, True, stream_slot, &fresh)


cdef int name_stream(ArenaCore* arena, CUstream handle, bint claim, uint32_t* stream_slot,
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
    if not find_stream(arena, handle, thread, stream_slot):
        if wants_reclaim(arena):
            lock_release(&arena.lock)
            reclaim(arena)
            lock_acquire(&arena.lock)
        if not find_stream(arena, handle, thread, stream_slot):
            status = add_stream(arena, handle, thread, stream_slot)
            fresh[0] = status == ARENA_OK
    if status == ARENA_OK:
        arena.streams[stream_slot[0]].silent = False
        if claim:
            slot_claim(arena, stream_slot[0])
    lock_release(&arena.lock)
    return status


cdef bint find_stream(const ArenaCore* arena, CUstream handle, const ThreadMark* thread,
                      uint32_t* stream_slot) noexcept nogil:
    cdef uint32_t i
    for i in range(1, arena.table.stream_slot_count):
        if arena.streams[i].handle == handle and arena.streams[i].thread == thread:
            stream_slot[0] = i
            return True
    return False


cdef int add_stream(ArenaCore* arena, CUstream handle, ThreadMark* thread,
                    uint32_t* stream_slot) noexcept nogil:
    if arena.vacant_slots == 0 and not add_slot(arena):
        return ARENA_NO_METADATA
    stream_slot[0] = 1
    while not arena.streams[stream_slot[0]].vacant:
        stream_slot[0] += 1
    if thread != NULL:
        thread_retain(thread)
    arena.vacant_slots -= 1
    arena.streams[stream_slot[0]].vacant = False
    arena.streams[stream_slot[0]].handle = handle
    arena.streams[stream_slot[0]].thread = thread
    return ARENA_OK


cdef bint add_slot(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    if arena.table.stream_slot_count >= arena.stream_capacity and not streams_grow(arena):
        return False
    # A slot that only one table got is found again by the next try; loops follow the other table.
    if (arena.small.stream_slot_count <= arena.table.stream_slot_count
            and bfc_add_stream_slot(&arena.small, &stream_slot) != BFC_OK):
        return False
    if bfc_add_stream_slot(&arena.table, &stream_slot) != BFC_OK:
        return False
    memset(&arena.streams[stream_slot], 0, sizeof(StreamSlot))
    arena.streams[stream_slot].epoch = 1
    arena.streams[stream_slot].vacant = True
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
    cdef uint32_t stream_slot
    for stream_slot in range(1, arena.table.stream_slot_count):
        if arena.streams[stream_slot].thread != NULL:
            thread_drop(arena.streams[stream_slot].thread)
    reserved_close(arena.streams, MAX_STREAMS * sizeof(StreamSlot))


# ---- who else names a slot -----------------------------------------------------------------------

cdef void slot_claim(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    count_add(&arena.streams[stream_slot].claims, 1)


cdef void slot_unclaim(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    count_add(&arena.streams[stream_slot].claims, -1)


cdef int arena_record(ArenaCore* arena, Uses** uses, uint32_t stream_slot) noexcept nogil:
    cdef bint added
    if not uses_add(uses, stream_slot, &added):
        return ARENA_NO_METADATA
    if added:
        slot_claim(arena, stream_slot)
    return ARENA_OK


# ---- vacating ------------------------------------------------------------------------------------

cdef bint arena_reset_stream(ArenaCore* arena, uint32_t stream_slot, bint silent) noexcept nogil:
    cdef uint8_t* marked
    cdef bint vacated = False
    if arena.tap.recorder != NULL:
        note_reset(arena, stream_slot)
    complete_all(arena, stream_slot)
    lock_acquire(&arena.lock)
    marked = marked_stream_slots(arena)
    if marked != NULL and is_idle(arena, stream_slot, marked):
        vacate(arena, stream_slot)
        vacated = True
    elif silent:
        arena.streams[stream_slot].silent = True
    lock_release(&arena.lock)
    free(marked)
    return vacated


cdef inline bint wants_reclaim(const ArenaCore* arena) noexcept nogil:
    return (arena.vacant_slots == 0 and arena.table.stream_slot_count >= RECLAIM_FIRST
            and arena.table.stream_slot_count >= arena.reclaim_at)


cdef void reclaim(ArenaCore* arena) noexcept nogil:
    # Vacates what nothing is marked with; of per-thread streams mostly those of threads that ended.
    cdef uint32_t stream_slot
    cdef uint8_t* marked
    caches_flush(arena)
    release_completed(arena, SLOT_RELEASED)
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if has_unknown_work(arena, stream_slot) and arena.settings.reuse != REUSE_NEVER:
            end_epochs(arena, stream_slot)
    marked = marked_stream_slots(arena)
    if marked != NULL:
        for stream_slot in range(1, arena.table.stream_slot_count):
            if is_idle(arena, stream_slot, marked):
                vacate(arena, stream_slot)
    # Twice as many as are in use, so that looking costs little per stream.
    arena.reclaim_at = 2 * (arena.table.stream_slot_count - arena.vacant_slots)
    lock_release(&arena.lock)
    free(marked)


cdef uint8_t* marked_stream_slots(const ArenaCore* arena) noexcept nogil:
    # One byte per stream slot: a chunk is marked with it. NULL: no host memory.
    cdef uint8_t* marked = <uint8_t*>calloc(arena.table.stream_slot_count + 1, 1)
    if marked != NULL:
        mark_stream_slots(&arena.table, marked)
        mark_stream_slots(&arena.small, marked)
    return marked


cdef void mark_stream_slots(const Bfc* table, uint8_t* marked) noexcept nogil:
    cdef uint32_t index, state
    for index in range(table.count):
        state = state_of(table, index)
        if state != CHUNK_UNUSED and state != CHUNK_HOLE:
            marked[table.chunks[index].stream_slot] = True


cdef inline bint has_unknown_work(const ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    return load32(&arena.streams[stream_slot].dirty) or arena.streams[stream_slot].event_epoch != 0


cdef inline bint is_idle(const ArenaCore* arena, uint32_t stream_slot,
                         const uint8_t* marked) noexcept nogil:
    cdef const StreamSlot* stream = &arena.streams[stream_slot]
    return (not stream.vacant and not marked[stream_slot] and stream.guards == 0
            and not stream.asking and load32(<const uint32_t*>&stream.claims) == 0
            and not has_unknown_work(arena, stream_slot))


cdef void vacate(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # Its epochs go on, so that what is still noted of them stays true.
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    if stream.thread != NULL:
        thread_drop(stream.thread)
    stream.thread = NULL
    stream.handle = NULL
    stream.silent = False
    stream.vacant = True
    arena.vacant_slots += 1

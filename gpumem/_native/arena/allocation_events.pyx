"""An arena's events, described for a recorder."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport (
    apart_from, ArenaCore, Block, BlockNote, IN_SMALL, index_of, table_of,
)
from gpumem._native.bfc cimport BFC_OK, bfc_resolve, Chunk, CHUNK_USED, MAX_CHUNKS, SLOT_RELEASED
from gpumem._support.atomics cimport load8, pointer_try, publish32, version_begin, version_of
from gpumem._support.events cimport (
    event_source_note, is_recorded, REC_ALLOC, REC_FREE, RecEvent, RecNoted,
)
from gpumem._support.memory cimport reserved_close, reserved_commit, reserved_open


# ---- blocks --------------------------------------------------------------------------------------

cdef void note_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        const Block* block) noexcept nogil:
    cdef RecNoted noted = note_event(arena, REC_ALLOC, block.address, nbytes, block.size,
                                     stream_slot, True)
    # No seal: sampling has left the allocation out, and no snapshot can refer to it.
    if noted.seal:
        remember(arena, block.handle, &noted)


cdef void note_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    cdef uint32_t index
    if bfc_resolve(table_of(arena, handle), handle & ~<uint64_t>IN_SMALL, &index) == BFC_OK:
        note_chunk(arena, REC_FREE, handle, stream_slot, True)


cdef void note_chunk(ArenaCore* arena, uint32_t kind, uint64_t handle, uint32_t stream_slot,
                     bint may_wait) noexcept nogil:
    cdef const Chunk* chunk = &table_of(arena, handle).chunks[index_of(handle)]
    cdef bint used = load8(&chunk.state) == CHUNK_USED
    note_event(arena, kind, chunk.address, chunk.requested if used else 0, chunk.size, stream_slot,
               may_wait)


cdef RecNoted note_event(ArenaCore* arena, uint32_t kind, uint64_t address, uint64_t nbytes,
                         uint64_t block, uint32_t stream_slot, bint may_wait) noexcept nogil:
    cdef RecEvent event = RecEvent(kind, address, nbytes, block,
                                   <uint64_t>arena.streams[stream_slot].handle)
    cdef RecNoted noted
    event_source_note(&arena.events, &event, may_wait, &noted)
    return noted


# ---- memory --------------------------------------------------------------------------------------

cdef void note_memory(ArenaCore* arena, uint32_t kind, uint64_t address,
                      uint64_t nbytes) noexcept nogil:
    # Slot 0: memory is no stream's. Not waiting: a lock is held.
    note_event(arena, kind, address, nbytes, nbytes, SLOT_RELEASED, False)


cdef void note_region(ArenaCore* arena, uint32_t kind, uint64_t address,
                      uint64_t nbytes) noexcept nogil:
    if is_recorded(&arena.events) and (
            not arena.settings.paged or apart_from(arena, address) != NULL):
        note_memory(arena, kind, address, nbytes)


# ---- by chunk ------------------------------------------------------------------------------------

cdef void remember(ArenaCore* arena, uint64_t handle, const RecNoted* noted) noexcept nogil:
    # Only the thread that has just allocated the block writes here, until the block is freed.
    cdef BlockNote* notes = notes_of(arena, (handle & IN_SMALL) != 0)
    cdef BlockNote* at
    if notes == NULL:
        return
    at = &notes[index_of(handle)]
    # Generation 0 while the rest is written: a reader without the lock then takes none of it.
    version_begin(&at.generation)
    at.number = noted.number
    at.time = noted.time
    at.seal = noted.seal
    at.recorder = <uint32_t>noted.recorder
    publish32(&at.generation, <uint32_t>(handle >> 32))


cdef BlockNote* notes_of(ArenaCore* arena, bint small) noexcept nogil:
    # Addresses for every chunk that there can be; memory comes with the first touch.
    cdef size_t nbytes = <size_t>MAX_CHUNKS * sizeof(BlockNote)
    cdef BlockNote* notes = arena.notes[small]
    if notes != NULL:
        return notes
    notes = <BlockNote*>reserved_open(nbytes)
    if notes == NULL:
        return NULL
    if (reserved_commit(notes, nbytes) != 0
            or not pointer_try(<void**>&arena.notes[small], NULL, notes)):
        # Another thread was first, or the kernel refused: the array of before counts.
        reserved_close(notes, nbytes)
    return arena.notes[small]


cdef bint block_note(const ArenaCore* arena, bint small, uint32_t index, uint32_t generation,
                     BlockNote* note) noexcept nogil:
    cdef const BlockNote* at
    if arena.notes[small] == NULL:
        return False
    at = &arena.notes[small][index]
    if version_of(&at.generation) != generation or generation == 0:
        return False
    # Compared again after the copy: the chunk may have been handed out anew meanwhile.
    note[0] = at[0]
    return version_of(&at.generation) == generation


cdef void notes_free(ArenaCore* arena) noexcept nogil:
    cdef uint32_t i
    for i in range(2):
        reserved_close(arena.notes[i], <size_t>MAX_CHUNKS * sizeof(BlockNote))
        arena.notes[i] = NULL

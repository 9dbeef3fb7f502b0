"""Parked blocks of an arena; see _arena_parked.pxd."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_cache cimport cache_find, cache_publish
from gpumem._arena_recorded cimport note_pending_free, note_pending_free_end
from gpumem._arena_types cimport ArenaCore, IN_SMALL, stamp_free, table_of
from gpumem._bfc cimport BFC_OK, Bfc, Chunk, SLOT_RELEASED, bfc_resolve
from gpumem._bfc_parked cimport bfc_begin_pending_free, bfc_end_pending_free
from gpumem._lease cimport Uses, uses_free
from gpumem._support.atomics cimport count_add


cdef bint free_later(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                     Uses* uses) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index
    if (arena.settings.passthrough      # the driver's free waits for every stream
            or bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK):
        uses_let_go(arena, uses)
        return False
    if not stamp_uses(arena, stream_slot, uses):
        uses_free(uses)
        return False
    cache_publish(arena, cache_find(arena))
    uses.handle = handle
    uses.stream_slot = stream_slot
    uses.epoch = stamp_free(&arena.streams[stream_slot])
    if arena.tap.recorder != NULL:
        note_pending_free(arena, handle, stream_slot)
    bfc_begin_pending_free(table, index, stream_slot, uses.epoch)
    uses.next = arena.pending_free
    arena.pending_free = uses
    arena.stats.num_frees += 1
    return True


cdef bint stamp_uses(ArenaCore* arena, uint32_t stream_slot, Uses* uses) noexcept nogil:
    # Claims become guards: uses end with what is queued now. The stream of the free orders itself;
    # one that is gone was drained.
    cdef uint32_t i, slot
    cdef uint32_t left = 0
    for i in range(uses.count):
        slot = uses.at[i].slot
        count_add(&arena.streams[slot].claims, -1)
        if slot == stream_slot or arena.streams[slot].silent:
            continue
        uses.at[left].slot = slot
        uses.at[left].until = stamp_free(&arena.streams[slot])
        arena.streams[slot].guards += 1
        left += 1
    uses.count = left
    return left != 0


cdef void uses_let_go(ArenaCore* arena, Uses* uses) noexcept nogil:
    cdef uint32_t i
    for i in range(uses.count):
        count_add(&arena.streams[uses.at[i].slot].claims, -1)
    uses_free(uses)


cdef bint is_done(const ArenaCore* arena, const Uses* uses) noexcept nogil:
    cdef uint32_t i
    for i in range(uses.count):
        if uses.at[i].until > arena.streams[uses.at[i].slot].done:
            return False
    return True


cdef bint free_completed(ArenaCore* arena) noexcept nogil:
    cdef Uses** link = &arena.pending_free
    cdef Uses* uses
    cdef bint found = False
    while link[0] != NULL:
        uses = link[0]
        if is_done(arena, uses):
            link[0] = uses.next
            free_pending(arena, uses, uses.stream_slot, uses.epoch)
            found = True
        else:
            link = &uses.next
    return found


cdef void free_all_pending(ArenaCore* arena) noexcept nogil:
    cdef Uses* uses
    while arena.pending_free != NULL:
        uses = arena.pending_free
        arena.pending_free = uses.next
        free_pending(arena, uses, uses.stream_slot, uses.epoch)


cdef void free_pending(ArenaCore* arena, Uses* uses, uint32_t stream_slot,
                       uint64_t epoch) noexcept nogil:
    # It is out of the list. What has completed meanwhile has no mark any more.
    cdef Bfc* table = table_of(arena, uses.handle)
    cdef uint32_t index = index_of(uses)
    cdef uint32_t i
    if epoch <= table.bins[stream_slot].completed:
        stream_slot = SLOT_RELEASED
    for i in range(uses.count):
        arena.streams[uses.at[i].slot].guards -= 1
    if arena.tap.recorder != NULL:
        note_pending_free_end(arena, uses.handle, uses.stream_slot)
    bfc_end_pending_free(table, index, stream_slot, epoch)
    if table.regions[table.chunks[index].region].persistent:
        arena.retired += 1
    uses_free(uses)


cdef inline uint32_t index_of(const Uses* uses) noexcept nogil:
    return <uint32_t>uses.handle & ~<uint32_t>IN_SMALL


# ---- taking one behind waits on the device -------------------------------------------------------

cdef Uses* pending_free_best(ArenaCore* arena, const Bfc* table, uint64_t size) noexcept nogil:
    cdef Uses* best = NULL
    cdef uint64_t best_size = <uint64_t>-1
    cdef Uses* uses = arena.pending_free
    cdef const Chunk* chunk
    while uses != NULL:
        chunk = &table.chunks[index_of(uses)]
        if (table_of(arena, uses.handle) == table and size <= chunk.size < best_size
                and not table.regions[chunk.region].persistent):
            best = uses
            best_size = chunk.size
        uses = uses.next
    return best


cdef bint is_pending_free(const ArenaCore* arena, const Uses* uses, uint64_t handle) noexcept nogil:
    cdef const Uses* at = arena.pending_free
    while at != NULL:
        if at == uses:
            return at.handle == handle
        at = at.next
    return False


cdef void free_pending_behind(ArenaCore* arena, Uses* uses, uint32_t taker) noexcept nogil:
    # As if it had been freed on the taker's stream now.
    cdef Uses** link = &arena.pending_free
    while link[0] != uses:
        link = &link[0].next
    link[0] = uses.next
    free_pending(arena, uses, taker, stamp_free(&arena.streams[taker]))

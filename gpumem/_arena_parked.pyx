"""Parked blocks of an arena; see _arena_parked.pxd."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_cache cimport cache_find, cache_publish
from gpumem._arena_recorded cimport note_parked, note_unparked
from gpumem._arena_types cimport ArenaCore, IN_SMALL, stamp_free, table_of
from gpumem._bfc cimport BFC_OK, Bfc, Chunk, LANE_RELEASED, bfc_resolve
from gpumem._bfc_parked cimport bfc_park, bfc_unpark
from gpumem._lease cimport Uses, uses_free
from gpumem._support.atomics cimport count_add


cdef bint park(ArenaCore* arena, uint64_t handle, uint32_t stream, Uses* uses) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index
    if (arena.settings.passthrough      # the driver's free waits for every stream
            or bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK):
        let_go(arena, uses)
        return False
    if not stamp_uses(arena, stream, uses):
        uses_free(uses)
        return False
    cache_publish(arena, cache_find(arena))
    uses.handle = handle
    uses.lane = stream
    uses.epoch = stamp_free(&arena.streams[stream])
    if arena.tap.recorder != NULL:
        note_parked(arena, handle, stream)
    bfc_park(table, index, stream, uses.epoch)
    uses.next = arena.parked
    arena.parked = uses
    arena.stats.num_frees += 1
    return True


cdef bint stamp_uses(ArenaCore* arena, uint32_t stream, Uses* uses) noexcept nogil:
    # Claims become guards: uses end with what is queued now. The stream of the free orders itself;
    # one that is gone was drained.
    cdef uint32_t i, slot
    cdef uint32_t left = 0
    for i in range(uses.count):
        slot = uses.at[i].slot
        count_add(&arena.streams[slot].claims, -1)
        if slot == stream or arena.streams[slot].silent:
            continue
        uses.at[left].slot = slot
        uses.at[left].until = stamp_free(&arena.streams[slot])
        arena.streams[slot].guards += 1
        left += 1
    uses.count = left
    return left != 0


cdef void let_go(ArenaCore* arena, Uses* uses) noexcept nogil:
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


cdef bint unpark_done(ArenaCore* arena) noexcept nogil:
    cdef Uses** link = &arena.parked
    cdef Uses* uses
    cdef bint found = False
    while link[0] != NULL:
        uses = link[0]
        if is_done(arena, uses):
            link[0] = uses.next
            unpark(arena, uses, uses.lane, uses.epoch)
            found = True
        else:
            link = &uses.next
    return found


cdef void unpark_all(ArenaCore* arena) noexcept nogil:
    cdef Uses* uses
    while arena.parked != NULL:
        uses = arena.parked
        arena.parked = uses.next
        unpark(arena, uses, uses.lane, uses.epoch)


cdef void unpark(ArenaCore* arena, Uses* uses, uint32_t lane, uint64_t epoch) noexcept nogil:
    # It is out of the list. What has settled meanwhile has no mark any more.
    cdef Bfc* table = table_of(arena, uses.handle)
    cdef uint32_t index = index_of(uses)
    cdef uint32_t i
    if epoch <= table.lanes[lane].settled:
        lane = LANE_RELEASED
    for i in range(uses.count):
        arena.streams[uses.at[i].slot].guards -= 1
    if arena.tap.recorder != NULL:
        note_unparked(arena, uses.handle, uses.lane)
    bfc_unpark(table, index, lane, epoch)
    if table.regions[table.chunks[index].region].persistent:
        arena.retired += 1
    uses_free(uses)


cdef inline uint32_t index_of(const Uses* uses) noexcept nogil:
    return <uint32_t>uses.handle & ~<uint32_t>IN_SMALL


# ---- taking one behind waits on the device -------------------------------------------------------

cdef Uses* parked_best(ArenaCore* arena, const Bfc* table, uint64_t size) noexcept nogil:
    cdef Uses* best = NULL
    cdef uint64_t best_size = <uint64_t>-1
    cdef Uses* uses = arena.parked
    cdef const Chunk* chunk
    while uses != NULL:
        chunk = &table.chunks[index_of(uses)]
        if (table_of(arena, uses.handle) == table and size <= chunk.size < best_size
                and not table.regions[chunk.region].persistent):
            best = uses
            best_size = chunk.size
        uses = uses.next
    return best


cdef bint is_parked(const ArenaCore* arena, const Uses* uses, uint64_t handle) noexcept nogil:
    cdef const Uses* at = arena.parked
    while at != NULL:
        if at == uses:
            return at.handle == handle
        at = at.next
    return False


cdef void unpark_behind(ArenaCore* arena, Uses* uses, uint32_t taker) noexcept nogil:
    # As if it had been freed on the taker's stream now.
    cdef Uses** link = &arena.parked
    while link[0] != uses:
        link = &link[0].next
    link[0] = uses.next
    unpark(arena, uses, taker, stamp_free(&arena.streams[taker]))

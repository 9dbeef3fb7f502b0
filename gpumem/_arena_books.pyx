"""Handing a block out and taking it back: the books, with the arena lock held."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_cache cimport KEPT_BYTES, cache_find, cache_own, cache_publish
from gpumem._arena_types cimport (
    arena_in_use,
    arena_reserved,
    ARENA_OK,
    ARENA_STALE,
    ArenaCore,
    Block,
    IN_SMALL,
    SPACES,
    stamp_free,
    table_of,
)
from gpumem._bfc cimport (
    Bfc,
    bfc_give,
    BFC_OK,
    bfc_resolve,
    Chunk,
    handle_of,
    LANE_RELEASED,
    store32,
)
from gpumem._bfc_check cimport bfc_check, bfc_invariant
from gpumem._page_check cimport pages_check, pages_invariant

cdef extern from "atomics.h" nogil:
    uint64_t sum_add(uint64_t* total, uint64_t by)

cdef extern from *:
    """
    #ifdef GPUMEM_DEBUG
    enum { GM_DEBUG = 1 };
    #else
    enum { GM_DEBUG = 0 };
    #endif
    #include <stdio.h>
    #include <stdlib.h>
    static inline void gm_panic(const char *invariant) {
        fprintf(stderr, "gpumem: an arena's books are broken: it does not hold that %s\\n",
                invariant);
        abort();
    }
    """
    void gm_panic(const char* invariant) noexcept nogil
    enum:
        GM_DEBUG


cdef void hand_out(ArenaCore* arena, const Bfc* table, uint32_t index,
                   Block* block) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef uint64_t size = chunk.size
    if size <= KEPT_BYTES and not table.regions[chunk.region].persistent:
        cache_own(arena, chunk)
    block.address = chunk.address
    block.size = size
    block.handle = handle_of(table, index) | (IN_SMALL if table == &arena.small else 0)
    arena.stats.num_allocs += 1
    if arena_in_use(arena) > arena.stats.max_in_use:
        arena.stats.max_in_use = arena_in_use(arena)
    if size > arena.stats.max_alloc_size:
        arena.stats.max_alloc_size = size
    if GM_DEBUG:
        require_sound(arena)


cdef int take_back(ArenaCore* arena, uint64_t handle, uint32_t stream) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index, region
    handle &= ~<uint64_t>IN_SMALL
    if bfc_resolve(table, handle, &index) != BFC_OK:
        return ARENA_STALE
    cache_publish(arena, cache_find(arena))
    region = table.chunks[index].region
    if table.regions[region].persistent:
        persistent_unuse(arena, index)
    else:
        bfc_give(table, index, stream, stamp_free(&arena.streams[stream]))
    arena.stats.num_frees += 1
    if GM_DEBUG:
        require_sound(arena)
    return ARENA_OK


cdef void note_reserved(ArenaCore* arena) noexcept nogil:
    if arena_reserved(arena) > arena.stats.max_reserved:
        arena.stats.max_reserved = arena_reserved(arena)
    charge_parent(arena)


cdef void charge_parent(ArenaCore* arena) noexcept nogil:
    if arena.parent != NULL:
        sum_add(&arena.parent.lent, arena_reserved(arena) - arena.charged)
        arena.charged = arena_reserved(arena)


cdef void require_sound(const ArenaCore* arena) noexcept nogil:
    # Debug builds only: stop at the operation that broke an invariant, not where it shows later.
    cdef int broken = check_tables(arena, False)
    if broken:
        gm_panic(invariant_text(broken))


cdef inline void persistent_unuse(ArenaCore* arena, uint32_t index) noexcept nogil:
    # The region goes back at the next call that may block: this may be a finalizer.
    bfc_give(&arena.table, index, LANE_RELEASED, 0)
    store32(&arena.retired, arena.retired + 1)


cdef int check_tables(const ArenaCore* arena, bint folded) noexcept nogil:
    cdef int broken = bfc_check(&arena.table, folded)
    cdef uint32_t i
    if broken == 0:
        broken = bfc_check(&arena.small, folded)
    if broken == 0:
        broken = bfc_check(&arena.persistent, folded)
    for i in range(SPACES):
        if broken == 0 and arena.settings.paged:
            broken = pages_check(&arena.spaces[i])
    return broken


cdef const char* invariant_text(int number) noexcept nogil:
    return bfc_invariant(number) if number < 40 else pages_invariant(number)

"""Handing a block out and taking it back: the books, with the arena lock held."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport (
    arena_in_use,
    ARENA_OK,
    ARENA_STALE,
    ArenaCore,
    Block,
    IN_SMALL,
    table_of,
)
from gpumem._bfc cimport Bfc, bfc_give, BFC_OK, bfc_resolve, handle_of, LANE_RELEASED
from gpumem._bfc_check cimport bfc_check, bfc_invariant

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
    cdef uint64_t size = table.chunks[index].size
    block.address = table.chunks[index].address
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
    region = table.chunks[index].region
    if table.regions[region].persistent:
        persistent_unuse(arena, handle)
    else:
        arena.streams[stream].dirty = True
        bfc_give(table, handle, stream, arena.streams[stream].epoch)
    arena.stats.num_frees += 1
    if GM_DEBUG:
        require_sound(arena)
    return ARENA_OK


cdef void require_sound(const ArenaCore* arena) noexcept nogil:
    # Debug builds only: stop at the operation that broke an invariant, not where it shows later.
    cdef int broken = check_tables(arena)
    if broken:
        gm_panic(bfc_invariant(broken))


cdef inline void persistent_unuse(ArenaCore* arena, uint64_t handle) noexcept nogil:
    # The region goes back at the next call that may block: this may be a finalizer.
    bfc_give(&arena.table, handle, LANE_RELEASED, 0)
    arena.retired += 1


cdef int check_tables(const ArenaCore* arena) noexcept nogil:
    cdef int broken = bfc_check(&arena.table)
    return broken if broken else bfc_check(&arena.small)

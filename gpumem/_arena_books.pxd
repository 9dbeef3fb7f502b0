"""The books of an arena: every function with the arena lock held."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_cache cimport cache_publish, gm_set_home
from gpumem._arena_types cimport (
    arena_in_use,
    ARENA_OK,
    ARENA_STALE,
    ArenaCore,
    Block,
    IN_SMALL,
    stamp_free,
    table_of,
    ThreadCache,
)
from gpumem._bfc cimport Bfc, bfc_free, BFC_OK, bfc_resolve, Chunk, handle_of

cdef extern from *:
    """
    #ifdef GPUMEM_DEBUG
    enum { GM_DEBUG = 1 };
    #else
    enum { GM_DEBUG = 0 };
    #endif
    """
    enum:
        GM_DEBUG

# A chunk was taken for the thread whose cache is `cache`: fills in the block and the statistics. It
# goes back to that cache, unless its region is persistent.
cdef inline void finish_allocate(ArenaCore* arena, ThreadCache* cache, const Bfc* table,
                                 uint32_t index, Block* block) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef uint64_t size = chunk.size
    if not table.regions[chunk.region].persistent:
        gm_set_home(&chunk.bin_prev, cache)
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

# Frees a block on a stream. ARENA_STALE: the handle names no live block.
cdef inline int table_free(ArenaCore* arena, ThreadCache* cache, uint64_t handle,
                           uint32_t stream_slot) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index
    if bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK:
        return ARENA_STALE
    cache_publish(arena, cache)
    if table.regions[table.chunks[index].region].persistent:
        persistent_block_free(arena, index)
    else:
        bfc_free(table, index, stream_slot, stamp_free(&arena.streams[stream_slot]))
    arena.stats.num_frees += 1
    if GM_DEBUG:
        require_sound(arena)
    return ARENA_OK

cdef void persistent_block_free(ArenaCore* arena, uint32_t index) noexcept nogil
# Memory came: keeps the highest reserved so far.
cdef void note_reserved(ArenaCore* arena) noexcept nogil
# Memory came or went: a graph pool's counts in its parent's limit.
cdef void charge_parent(ArenaCore* arena) noexcept nogil
# Debug builds: stops the process at the operation that broke an invariant.
cdef void require_sound(const ArenaCore* arena) noexcept nogil
# 0, or the number of the first broken invariant; `folded` as for bfc_check.
cdef int check_tables(const ArenaCore* arena, bint folded) noexcept nogil
cdef const char* invariant_text(int number) noexcept nogil

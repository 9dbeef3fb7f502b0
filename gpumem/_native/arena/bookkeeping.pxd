"""An arena's bookkeeping: the state changes of an allocation and a free, its charges, its events
for a recorder, and copies of its metadata.

Caller holds the arena lock, unless a comment says otherwise.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.thread_cache cimport cache_publish, gm_set_home
from gpumem._native.arena.types cimport (
    arena_in_use, ARENA_OK, ARENA_STALE, ArenaCore, ArenaStats, Block, BlockNote, IN_SMALL,
    stamp_free, table_of, ThreadCache,
)
from gpumem._native.arena.values cimport (
    ArenaCopy, ArenaCounts, ArenaFigures, FamilyCounts, PageCopy, TableCopy,
)
from gpumem._native.bfc cimport Bfc, bfc_free, BFC_OK, bfc_resolve, Chunk, handle_of, Region
from gpumem._support.atomics cimport locked_add64, locked_raise64, store32
from gpumem._support.events cimport RecNoted

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

# Fills in the block and the statistics after a chunk was taken for the thread that owns `cache`.
# The chunk is freed to that cache, unless its region is persistent.
cdef inline void finish_allocate(ArenaCore* arena, ThreadCache* cache, const Bfc* table,
                                 uint32_t index, Block* block) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef uint64_t size = chunk.size
    if not chunk.persistent:
        gm_set_home(&chunk.bin_prev, cache)
    block.address = chunk.address
    block.size = size
    block.handle = handle_of(table, index) | (IN_SMALL if table == &arena.small else 0)
    # Counted in the cache, because threads would contend for the cache line of the arena's count.
    locked_add64(&cache.allocs if cache != NULL else &arena.stats.num_allocs, 1)
    locked_raise64(&arena.stats.max_in_use, arena_in_use(arena))
    locked_raise64(&arena.stats.max_alloc_size, size)
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
    # Its region is released by the next call that may block: this may be a finalizer.
    if table.chunks[index].persistent:
        store32(&arena.retired, arena.retired + 1)
    bfc_free(table, index, stream_slot, stamp_free(&arena.streams[stream_slot]))
    locked_add64(&arena.stats.num_frees, 1)
    if GM_DEBUG:
        require_sound(arena)
    return ARENA_OK

# After growth: updates the highest reserved so far.
cdef void note_reserved(ArenaCore* arena) noexcept nogil
# Debug builds: stops the process at the operation that broke an invariant.
cdef void require_sound(const ArenaCore* arena) noexcept nogil
# 0, or the number of the first broken invariant; `folded` as for bfc_check.
cdef int check_tables(const ArenaCore* arena, bint folded) noexcept nogil
# Caller holds `grow_lock`, with no growth under way. Checks its level in the same way.
cdef int check_level(const ArenaCore* arena) noexcept nogil
cdef const char* invariant_text(int number) noexcept nogil


# ---- The limits of an arena: bytes that it holds, or bytes of its blocks in use
#
# A growth charges the arena's level before it calls the driver, with its grow lock: the charge is
# added at the level that the arena shares with its tags and graph pools, which refuses to pass
# max_mem, and at each of the user's budgets above. A refusal names the level that refused, so that
# the status says whether max_mem or a budget did. Bytes that were released are refunded by one
# function that compares with the metadata (`arena_reconcile`): after any failure half-way, at rest
# the level's `used` is the bytes that the arena holds. The fast path does not touch it.
#
# Bytes of blocks in use are charged around an allocation and refunded with its free, whatever the
# thread's cache then does with it: a cached block is not in use.


# Makes the arena's level and the one above it, with max_mem as its limit. False: out of host
# memory.
cdef bint arena_level_init(ArenaCore* arena) noexcept nogil
# A fresh graph pool counts its blocks in use where its arena does. False: out of host memory.
cdef bint arena_join_as(ArenaCore* pool, const ArenaCore* arena) noexcept nogil
# Caller holds `grow_lock`. Charges bytes that the driver is to allocate, or returns
# ARENA_OVER_LIMIT or ARENA_OVER_BUDGET.
cdef int arena_charge(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# The same for a region: as much of `wanted` as there is room for, at least `size`.
cdef int arena_charge_region(ArenaCore* arena, uint64_t size, uint64_t* wanted) noexcept nogil
# The same for pages, of which some are released to make others. max_mem counts the difference. The
# user's budgets count all that are created, because those released are held until the driver has
# them; arena_refund_pages undoes that part afterwards.
cdef int arena_charge_pages(ArenaCore* arena, uint64_t created, uint64_t released) noexcept nogil
cdef void arena_refund_pages(ArenaCore* arena, uint64_t created, uint64_t released) noexcept nogil
# Notes the bytes that a refused budget's error and callbacks name, for a tag's parent too.
cdef int refuse_budget(ArenaCore* arena, uint64_t wanted) noexcept nogil
# Caller holds `grow_lock`, not `lock`, with no growth under way. Refunds bytes that the arena does
# not hold, and raises the peak of the held bytes.
cdef void arena_reconcile(ArenaCore* arena) noexcept nogil
# Bytes that an arena and its children hold. Without a lock: each arena's sum is of another moment.
cdef uint64_t family_reserved(ArenaCore* arena) noexcept nogil

# Charges a block in use: the request before a block is searched for, the padding once the block is
# found, because only then it is known. False: the budget refuses; nothing more is charged.
cdef bint charge_request(ArenaCore* arena, uint64_t nbytes) noexcept nogil
cdef bint charge_padding(ArenaCore* arena, uint64_t nbytes, const Block* block) noexcept nogil
# Returns whether the budget would admit the padding of a block of `whole` bytes, before a wait is
# queued that nothing undoes.
cdef bint padding_has_room(ArenaCore* arena, uint64_t size, uint64_t whole) noexcept nogil
# Bytes that a block counts for; 0: it is not counted, or the handle names no live block.
cdef uint64_t counted_bytes(ArenaCore* arena, uint64_t handle) noexcept nogil
cdef void count_out(ArenaCore* arena, uint64_t nbytes) noexcept nogil

# ---- Events of an arena, for the recorder attached to its `events` -------------------------------
#
# They are called only where `is_recorded(&arena.events)`, without a lock, unless a comment says
# otherwise.

# Notes that a block was allocated; also in the notes of chunks, for snapshots.
cdef void note_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        const Block* block) noexcept nogil
# Notes that a block is about to be freed on a stream; a stale handle makes no event.
cdef void note_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
# Any event about bytes, as its kind defines them; `block`: padding included. Without `may_wait` the
# event is lost where its file would have to grow first: so if the caller holds `lock`.
cdef RecNoted note_event(ArenaCore* arena, uint32_t kind, uint64_t address, uint64_t nbytes,
                         uint64_t block, uint32_t stream_slot, bint may_wait) noexcept nogil
# The same about the chunk of a block.
cdef void note_chunk(ArenaCore* arena, uint32_t kind, uint64_t handle, uint32_t stream_slot,
                     bint may_wait) noexcept nogil
# Caller holds `lock`; the arena need not be recorded. A region was made or is released. Pages are
# recorded by their space, page by page, and so is a region that is cut from pages.
cdef void note_region(ArenaCore* arena, uint32_t kind, uint64_t address,
                      uint64_t nbytes) noexcept nogil

# Copies what was recorded of a chunk of the second table (`small`) or the first; False: nothing.
cdef bint block_note(const ArenaCore* arena, bint small, uint32_t index, uint32_t generation,
                     BlockNote* note) noexcept nogil
cdef void notes_free(ArenaCore* arena) noexcept nogil

# ---- An arena's metadata at one moment, copied while no thread changes it ------------------------
#
# Caller holds no lock. Only the copy is made with the locks: its memory is allocated and touched
# before, and readers use the copy alone.

# False: out of host memory, and nothing to free; else arena_copy_free ends it.
cdef bint arena_copy(ArenaCore* arena, ArenaCopy* copy) noexcept nogil
cdef void arena_copy_free(ArenaCopy* copy) noexcept nogil

# Adds the figures of an arena. Loops over its stream slots, its regions and its pending frees.
cdef void arena_add_figures(ArenaCore* arena, ArenaFigures* figures) noexcept nogil

# Fills in the counters of one arena, with flushed caches. Blocks in a debug heap's quarantine count
# as free.
cdef void arena_counts(ArenaCore* arena, ArenaCounts* counts) noexcept nogil
# The same without a lock, so that the counters are of different moments; `num_regions` and
# `largest_free` are 0.
cdef void arena_counts_now(const ArenaCore* arena, ArenaCounts* counts) noexcept nogil
cdef FamilyCounts family_counts(const ArenaCore* arena) noexcept nogil

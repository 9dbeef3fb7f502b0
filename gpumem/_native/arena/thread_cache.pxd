"""Caches of small blocks, one per thread and arena, in front of the arena's table.

A block of up to 64 KiB that is freed stays *cached*: in the cache of the thread that took it, in a
stack of blocks of exactly its size and stream. To allocate it again costs neither search, split nor
merge, and no lock that other threads wait for. Each stack holds up to CACHED_DEPTH blocks.

A larger one, or one that finds its stack full, is cached too, but only the last of them: it goes to
the table under the lock of the next allocation that cannot use it, so that a free and an allocation
lock once. Where a table packs (bfc/table), with one stream's memory in it, blocks above 1 MiB are
not reused that way: a long-lived block must not lie wherever the last one happened to lie.

A block that another thread frees is pushed onto its cache's `remote` list without a lock (a
Treiber stack that is only ever emptied whole, so that no entry can return unnoticed: R. K.
Treiber, 1986). The owner collects it when a stack runs dry.

A cache's lock (owner_lock.h) costs its owner nothing. Growth, a shrink and statistics, which need
to see all free memory, flush every cache first. Order of locks: grow lock, caches lock, a
cache's lock, arena lock.

Sums stay exact although the table does not change: it counts cached chunks as used, and
`cached_bytes` of the arena is the part that the caches have published. A cache notes the minimum
of its bytes since it
last published, so that for one thread the peak of bytes in use is exact; for several it is exact
but for what other threads' caches did since they published.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block, Stacks, ThreadCache, ThreadMark
from gpumem._native.bfc cimport Bfc, Chunk, QUANTUM_BITS, round_to_quantum
from gpumem._support.atomics cimport load32, load64, locked_raise64, store64

cdef extern from *:
    """
    #include <string.h>
    /* A used chunk's two bin links hold the address of the cache that it returns to. */
    static inline void *gm_home(const uint32_t *links) {
        void *home;
        memcpy(&home, links, sizeof(home));
        return home;
    }
    static inline void gm_set_home(uint32_t *links, void *home) {
        memcpy(links, &home, sizeof(home));
    }
    """
    void* gm_home(const uint32_t* links) noexcept nogil
    void gm_set_home(uint32_t* links, void* home_cache) noexcept nogil

cdef enum:
    CACHED_QUANTA = 256         # blocks of up to so many quanta, 64 KiB, are cached
    CACHED_BYTES = 65536
    CACHED_DEPTH = 32           # of each size and stream
    LAST_BYTES = 1048576        # up to this size the block freed last is reused wherever it lies
    REMOTE_DEPTH = 64           # freed by other threads and not yet collected

# The calling thread's cache; NULL if it has none yet.
cdef ThreadCache* cache_find(const ArenaCore* arena) noexcept nogil
# The same, made or adopted from a thread that has ended; NULL: out of host memory.
cdef ThreadCache* cache_make(ArenaCore* arena) noexcept nogil

# NULL: the stream has none yet.
cdef inline Stacks* stacks_now(const ThreadCache* cache, uint32_t stream_slot) noexcept nogil:
    return cache.stacks[stream_slot] if stream_slot < cache.slot_count else NULL

# Reads without the lock: only its owner adds blocks.
cdef inline bint cache_may_have(const ThreadCache* cache, uint32_t stream_slot,
                                uint64_t requested) noexcept nogil:
    cdef uint64_t size = round_to_quantum(requested)
    cdef Stacks* stacks
    if load64(&cache.last_size) == size:
        return True
    stacks = stacks_now(cache, stream_slot)
    return size <= CACHED_BYTES and (
        load64(&cache.remote) != 0
        or (stacks != NULL and load32(&stacks.head[size >> QUANTUM_BITS]) != 0))

cdef bint cache_allocate(ArenaCore* arena, ThreadCache* cache, uint64_t requested,
                         uint32_t stream_slot, Block* block) noexcept nogil

# Caches a used chunk that was freed on the slot's stream; `mine` is the cache of the calling
# thread. False: the table has to take the chunk.
cdef inline bint cache_free(ArenaCore* arena, ThreadCache* mine, Bfc* table, uint32_t index,
                            uint32_t stream_slot) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef ThreadCache* home_cache = <ThreadCache*>gm_home(&chunk.bin_prev)
    if home_cache == NULL or chunk.stream_slot != stream_slot:
        return False
    if home_cache != mine:
        return chunk.size <= CACHED_BYTES and cache_free_remote(arena, home_cache, table, index)
    cache_free_own(arena, mine, table, chunk, index)
    return True

# `chunk` is the chunk of that index: every caller has read it.
cdef void cache_free_own(ArenaCore* arena, ThreadCache* cache, Bfc* table, Chunk* chunk,
                         uint32_t index) noexcept nogil
cdef bint cache_free_remote(ArenaCore* arena, ThreadCache* home_cache, Bfc* table,
                            uint32_t index) noexcept nogil

# Caller holds `lock` and owns the cache. Before the table changes; NULL: nothing to publish.
cdef inline void cache_publish(ArenaCore* arena, ThreadCache* cache) noexcept nogil:
    cdef uint64_t others, peak
    if cache == NULL or (cache.published == cache.cached_bytes
                         and cache.min_cached == cache.cached_bytes):
        return
    others = arena.cached_bytes - cache.published
    peak = arena.table.in_use + arena.small.in_use - others - cache.min_cached
    locked_raise64(&arena.stats.max_in_use, peak)
    store64(&arena.cached_bytes, others + cache.cached_bytes)
    cache.published = cache.cached_bytes
    cache.min_cached = cache.cached_bytes

# Caller holds the cache's lock and `lock`. Frees the block that was freed last to the table.
cdef void cache_free_last(ArenaCore* arena, ThreadCache* cache) noexcept nogil
# The calling thread's mark, which outlives the thread while it is retained; NULL: out of host
# memory.
cdef ThreadMark* thread_now() noexcept nogil
cdef void thread_retain(ThreadMark* thread) noexcept nogil
cdef void thread_drop(ThreadMark* thread) noexcept nogil

# Frees the blocks that the calling thread has cached of other streams, and the block that it freed
# last on any stream. Returns whether there was any.
cdef bint cache_flush_other_streams(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Frees the largest blocks that the calling thread has in stacks of this stream, until they have at
# least `nbytes` together. Returns whether there was any.
cdef bint cache_free_some(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot) noexcept nogil
# Caller holds `lock` and the lock of its own cache, which is published. Frees a block of `size`
# bytes or more, from the deepest stack of this stream that has one. Returns whether there was any.
cdef bint cache_free_fitting(ArenaCore* arena, ThreadCache* cache, uint64_t size,
                             uint32_t stream_slot) noexcept nogil
# Frees every block that the calling thread has cached.
cdef void cache_flush(ArenaCore* arena) noexcept nogil
# Frees every cached block, and adds the counts of caches to the arena's. Returns whether there was
# any block.
cdef bint caches_flush(ArenaCore* arena) noexcept nogil
# Sums of all caches. Read without a lock, so that they are of different moments while other threads
# allocate or free.
cdef struct CacheCounts:
    uint64_t nbytes             # cached, which the tables count as used
    uint64_t requested          # bytes that `requested_in_use` of both tables has changed by
    uint64_t allocs             # not yet in the arena's statistics
    uint64_t frees

cdef CacheCounts caches_counts(const ArenaCore* arena) noexcept nogil
# Returns how many blocks were freed so far.
cdef uint64_t caches_count_frees(ArenaCore* arena) noexcept nogil
# Keeps caches from changing until caches_thaw. Caller does not hold `lock` yet.
cdef void caches_hold(ArenaCore* arena) noexcept nogil
# The same, and frees every cached block first.
cdef void caches_freeze(ArenaCore* arena) noexcept nogil
cdef void caches_thaw(ArenaCore* arena) noexcept nogil
cdef void caches_free(ArenaCore* arena) noexcept nogil

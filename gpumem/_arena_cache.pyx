"""Caches of small blocks, one per thread and arena; see _arena_cache.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from gpumem._arena_types cimport (
    ArenaCore,
    Block,
    IN_SMALL,
    Stacks,
    ThreadCache,
    ThreadMark,
    lock_acquire,
    lock_init,
    lock_release,
    stamp_free,
    table_of,
)
from gpumem._bfc cimport (
    BFC_OK,
    Bfc,
    CHUNK_KEPT,
    CHUNK_USED,
    Chunk,
    LANE_RELEASED,
    NIL,
    QUANTUM,
    QUANTUM_BITS,
    bfc_give,
    bfc_resolve,
    handle_of,
    store32,
)

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t alignment, size_t nbytes)

cdef extern from "atomics.h" nogil:
    uint64_t load64(const uint64_t* word)

cdef extern from "thread_cache.h" nogil:
    void mark_retain(ThreadMark* mark)
    void mark_drop(ThreadMark* mark)
    bint mark_ended(const ThreadMark* mark)
    ThreadMark* thread_mark()
    void* cache_remembered(uint64_t serial)
    void cache_remember(uint64_t serial, void* cache)

cdef extern from *:
    """
    #include <string.h>
    /* A used chunk's two bin links hold the address of the cache it goes back to. */
    static inline void *gm_home(const uint32_t *links) {
        void *home;
        memcpy(&home, links, sizeof(home));
        return home;
    }
    static inline void gm_set_home(uint32_t *links, void *home) {
        memcpy(links, &home, sizeof(home));
    }
    static inline uint64_t gm_take_all(uint64_t *list) {
        return __atomic_exchange_n(list, 0, __ATOMIC_ACQUIRE);
    }
    static inline int gm_swap(uint64_t *list, uint64_t *seen, uint64_t wanted) {
        return __atomic_compare_exchange_n(list, seen, wanted, 1, __ATOMIC_RELEASE,
                                           __ATOMIC_RELAXED);
    }
    """
    void* gm_home(const uint32_t* links) noexcept nogil
    void gm_set_home(uint32_t* links, void* home) noexcept nogil
    uint64_t gm_take_all(uint64_t* list) noexcept nogil
    bint gm_swap(uint64_t* list, uint64_t* seen, uint64_t wanted) noexcept nogil

cdef enum:
    CACHE_LINE = 64


# ---- the fast path -------------------------------------------------------------------------------

cdef ThreadCache* cache_find(const ArenaCore* arena) noexcept nogil:
    return <ThreadCache*>cache_remembered(arena.serial)


cdef void cache_own(ArenaCore* arena, Chunk* chunk) noexcept nogil:
    gm_set_home(&chunk.bin_prev, cache_find(arena))


cdef bint cache_take(ArenaCore* arena, ThreadCache* cache, uint64_t requested, uint32_t slot,
                     Block* block) noexcept nogil:
    cdef uint32_t quanta = <uint32_t>((requested + QUANTUM - 1) >> QUANTUM_BITS)
    cdef uint32_t index
    lock_acquire(&cache.lock)
    index = stack_top(cache, slot, quanta)
    if index == NIL and load64(&cache.remote):
        collect(arena, cache)
        index = stack_top(cache, slot, quanta)
    if index != NIL:
        pop(arena, cache, slot, quanta, requested, block)
    lock_release(&cache.lock)
    return index != NIL


cdef bint cache_give(ArenaCore* arena, uint64_t handle, uint32_t slot) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef ThreadCache* home
    cdef ThreadCache* mine
    cdef uint32_t index
    cdef bint kept
    if bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK:
        return False
    home = <ThreadCache*>gm_home(&table.chunks[index].bin_prev)
    if home == NULL or table.chunks[index].lane != slot:
        return False
    mine = cache_find(arena)
    if mine != home:
        return push_remote(arena, home, table, index)
    lock_acquire(&mine.lock)
    kept = table == kept_table(arena) and push(arena, mine, table, index)
    lock_release(&mine.lock)
    return kept


# ---- one function per change of state ------------------------------------------------------------

cdef inline uint32_t stack_top(const ThreadCache* cache, uint32_t slot,
                               uint32_t quanta) noexcept nogil:
    # Stacks store index + 1, so that fresh memory is empty stacks.
    if slot >= cache.slot_count or cache.stacks[slot] == NULL:
        return NIL
    return cache.stacks[slot].head[quanta] - 1


cdef inline void pop(ArenaCore* arena, ThreadCache* cache, uint32_t slot, uint32_t quanta,
                     uint64_t requested, Block* block) noexcept nogil:
    # Kept to used. Its stack is not empty.
    cdef Bfc* table = kept_table(arena)
    cdef Stacks* stacks = cache.stacks[slot]
    cdef uint32_t index = stacks.head[quanta] - 1
    cdef Chunk* chunk = &table.chunks[index]
    stacks.head[quanta] = chunk.bin_next
    stacks.depth[quanta] -= 1
    stacks.chunks -= 1
    cache.kept_bytes -= chunk.size
    if cache.kept_bytes < cache.least_kept:
        cache.least_kept = cache.kept_bytes
    cache.requested += requested
    cache.allocs += 1
    chunk.requested = requested
    gm_set_home(&chunk.bin_prev, cache)
    store32(&chunk.generation, chunk.generation + 1)
    store32(&chunk.state, CHUNK_USED)
    block.address = chunk.address
    block.size = chunk.size
    block.handle = handle_of(table, index) | (IN_SMALL if table == &arena.small else 0)


cdef inline bint push(ArenaCore* arena, ThreadCache* cache, Bfc* table,
                      uint32_t index) noexcept nogil:
    # Used to kept, by the cache's owner; False and nothing changed if there is no room.
    cdef Chunk* chunk = &table.chunks[index]
    cdef Stacks* stacks = stacks_of(cache, chunk.lane)
    if stacks == NULL or stacks.depth[chunk.size >> QUANTUM_BITS] == KEPT_DEPTH:
        return False
    chunk.epoch = stamp_free(&arena.streams[chunk.lane])
    store32(&chunk.state, CHUNK_KEPT)
    note_freed(cache, chunk)
    stack(cache, stacks, chunk, index)
    return True


cdef inline void note_freed(ThreadCache* cache, Chunk* chunk) noexcept nogil:
    cache.frees += 1
    cache.requested -= chunk.requested
    chunk.requested = 0


cdef inline void stack(ThreadCache* cache, Stacks* stacks, Chunk* chunk,
                       uint32_t index) noexcept nogil:
    cdef uint64_t quanta = chunk.size >> QUANTUM_BITS
    chunk.bin_next = stacks.head[quanta]
    stacks.head[quanta] = index + 1
    stacks.depth[quanta] += 1
    stacks.chunks += 1
    cache.kept_bytes += chunk.size


cdef bint push_remote(ArenaCore* arena, ThreadCache* home, Bfc* table,
                      uint32_t index) noexcept nogil:
    # Used to kept, by a thread that does not own the cache and takes no lock. The word counts the
    # list in its upper half; the lower half is the first index + 1, and IN_SMALL tells its table.
    cdef uint64_t seen = load64(&home.remote)
    cdef uint32_t entry = (index + 1) | (IN_SMALL if table == &arena.small else 0)
    cdef Chunk* chunk = &table.chunks[index]
    if seen >> 32 >= REMOTE_DEPTH:
        return False
    chunk.epoch = stamp_free(&arena.streams[chunk.lane])
    store32(&chunk.state, CHUNK_KEPT)
    chunk.bin_next = <uint32_t>seen
    while not gm_swap(&home.remote, &seen, ((seen >> 32) + 1) << 32 | entry):
        chunk.bin_next = <uint32_t>seen
    return True


cdef void collect(ArenaCore* arena, ThreadCache* cache) noexcept nogil:
    # With the cache's lock: what other threads freed goes to the stacks, the overflow to the table.
    cdef uint32_t entry = <uint32_t>gm_take_all(&cache.remote)
    cdef uint32_t index
    cdef Bfc* table
    cdef Stacks* stacks
    cdef Chunk* chunk
    while entry != 0:
        table = table_of(arena, entry)
        index = entry & ~<uint32_t>IN_SMALL
        chunk = &table.chunks[index - 1]
        entry = chunk.bin_next
        if table != kept_table(arena):
            release_early_block(arena, cache, table, index - 1)
            continue
        note_freed(cache, chunk)
        stacks = stacks_of(cache, chunk.lane)
        if stacks == NULL or stacks.depth[chunk.size >> QUANTUM_BITS] == KEPT_DEPTH:
            lock_acquire(&arena.lock)
            cache_publish(arena, cache)
            release(table, index - 1)
            lock_release(&arena.lock)
        else:
            stack(cache, stacks, chunk, index - 1)


cdef void release_early_block(ArenaCore* arena, ThreadCache* cache, Bfc* table,
                              uint32_t index) noexcept nogil:
    # Kept to free, of a small block from before a paged arena had a table for them.
    lock_acquire(&arena.lock)
    cache.frees += 1
    table.requested_in_use -= table.chunks[index].requested
    table.chunks[index].requested = 0
    release(table, index)
    lock_release(&arena.lock)


cdef inline void release(Bfc* table, uint32_t index) noexcept nogil:
    # Kept to free, with both locks. What has settled since the free has no mark any more.
    cdef uint32_t lane = table.chunks[index].lane
    cdef uint64_t epoch = table.chunks[index].epoch
    if epoch <= table.lanes[lane].settled:
        lane = LANE_RELEASED
    bfc_give(table, index, lane, epoch)


cdef void cache_publish(ArenaCore* arena, ThreadCache* cache) noexcept nogil:
    cdef uint64_t others, peak
    if cache == NULL:
        return
    others = arena.kept_bytes - cache.published
    peak = arena.table.in_use + arena.small.in_use - others - cache.least_kept
    if peak > arena.stats.max_in_use:
        arena.stats.max_in_use = peak
    arena.kept_bytes = others + cache.kept_bytes
    cache.published = cache.kept_bytes
    cache.least_kept = cache.kept_bytes


cdef inline Bfc* kept_table(ArenaCore* arena) noexcept nogil:
    # What is kept lies in one table; the choice changes only while every cache is empty and locked.
    return &arena.small if arena.small_below else &arena.table


cdef inline Stacks* stacks_of(ThreadCache* cache, uint32_t slot) noexcept nogil:
    cdef Stacks** stacks
    if slot < cache.slot_count and cache.stacks[slot] != NULL:
        return cache.stacks[slot]
    if slot >= cache.slot_count:
        stacks = <Stacks**>realloc(cache.stacks, (slot + 8) * sizeof(Stacks*))
        if stacks == NULL:
            return NULL
        memset(stacks + cache.slot_count, 0, (slot + 8 - cache.slot_count) * sizeof(Stacks*))
        cache.stacks = stacks
        cache.slot_count = slot + 8
    cache.stacks[slot] = <Stacks*>calloc(1, sizeof(Stacks))
    return cache.stacks[slot]


# ---- all caches of an arena ----------------------------------------------------------------------

cdef void caches_flush(ArenaCore* arena) noexcept nogil:
    cdef ThreadCache* cache
    lock_acquire(&arena.caches_lock)
    cache = arena.caches
    while cache != NULL:
        lock_acquire(&cache.lock)
        flush(arena, cache)
        lock_release(&cache.lock)
        cache = cache.next
    lock_release(&arena.caches_lock)


cdef void caches_freeze(ArenaCore* arena) noexcept nogil:
    cdef ThreadCache* cache
    lock_acquire(&arena.caches_lock)
    cache = arena.caches
    while cache != NULL:
        lock_acquire(&cache.lock)
        flush(arena, cache)
        cache = cache.next


cdef void caches_thaw(ArenaCore* arena) noexcept nogil:
    cdef ThreadCache* cache = arena.caches
    while cache != NULL:
        lock_release(&cache.lock)
        cache = cache.next
    lock_release(&arena.caches_lock)


cdef void flush(ArenaCore* arena, ThreadCache* cache) noexcept nogil:
    # With the cache's lock.
    cdef uint32_t slot
    collect(arena, cache)
    lock_acquire(&arena.lock)
    cache_publish(arena, cache)
    for slot in range(cache.slot_count):
        if cache.stacks[slot] != NULL and cache.stacks[slot].chunks:
            flush_stacks(kept_table(arena), cache.stacks[slot])
    arena.kept_bytes -= cache.kept_bytes
    cache.kept_bytes = 0
    cache.published = 0
    cache.least_kept = 0
    kept_table(arena).requested_in_use += cache.requested
    arena.stats.num_allocs += cache.allocs
    arena.stats.num_frees += cache.frees
    cache.requested = 0
    cache.allocs = 0
    cache.frees = 0
    lock_release(&arena.lock)


cdef void flush_stacks(Bfc* table, Stacks* stacks) noexcept nogil:
    cdef uint32_t quanta, index
    for quanta in range(1, KEPT_QUANTA + 1):
        while stacks.head[quanta]:
            index = stacks.head[quanta] - 1
            stacks.head[quanta] = table.chunks[index].bin_next
            release(table, index)
        stacks.depth[quanta] = 0
    stacks.chunks = 0


# ---- life and death ------------------------------------------------------------------------------

cdef ThreadCache* cache_make(ArenaCore* arena) noexcept nogil:
    cdef ThreadMark* mark = thread_mark()
    cdef ThreadCache* cache
    if mark == NULL:
        return NULL
    lock_acquire(&arena.caches_lock)
    cache = find_listed(arena, mark)
    if cache == NULL:
        cache = add_cache(arena, mark)
    lock_release(&arena.caches_lock)
    if cache != NULL:
        cache_remember(arena.serial, cache)
    return cache


cdef ThreadCache* find_listed(ArenaCore* arena, ThreadMark* mark) noexcept nogil:
    # The thread's own, forgotten for want of room, or one whose thread has ended.
    cdef ThreadCache* cache = arena.caches
    while cache != NULL:
        if cache.owner == mark:
            return cache
        cache = cache.next
    cache = arena.caches
    while cache != NULL:
        if mark_ended(cache.owner):
            mark_drop(cache.owner)
            mark_retain(mark)
            cache.owner = mark
            return cache
        cache = cache.next
    return NULL


cdef ThreadCache* add_cache(ArenaCore* arena, ThreadMark* mark) noexcept nogil:
    cdef size_t nbytes = (sizeof(ThreadCache) + CACHE_LINE - 1) & ~<size_t>(CACHE_LINE - 1)
    cdef ThreadCache* cache = <ThreadCache*>aligned_alloc(CACHE_LINE, nbytes)
    if cache == NULL:
        return NULL
    memset(cache, 0, nbytes)
    lock_init(&cache.lock)
    mark_retain(mark)
    cache.owner = mark
    cache.next = arena.caches
    arena.caches = cache
    return cache


cdef void caches_free(ArenaCore* arena) noexcept nogil:
    # Nobody uses the arena any more; threads forget its serial by themselves.
    cdef ThreadCache* cache = arena.caches
    cdef ThreadCache* following
    cdef uint32_t slot
    while cache != NULL:
        following = cache.next
        for slot in range(cache.slot_count):
            free(cache.stacks[slot])
        free(cache.stacks)
        mark_drop(cache.owner)
        free(cache)
        cache = following
    arena.caches = NULL


# ---- threads as names ----------------------------------------------------------------------------

cdef ThreadMark* thread_now() noexcept nogil:
    return thread_mark()


cdef void thread_retain(ThreadMark* thread) noexcept nogil:
    mark_retain(thread)


cdef void thread_drop(ThreadMark* thread) noexcept nogil:
    mark_drop(thread)


cdef bint thread_has_ended(const ThreadMark* thread) noexcept nogil:
    return mark_ended(thread)

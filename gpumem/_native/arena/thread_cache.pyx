"""Caches of small blocks, one per thread and arena."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from gpumem._native.arena.types cimport (
    ArenaCore, Block, IN_SMALL, Stacks, stamp_free, table_of, ThreadCache, ThreadMark,
)
from gpumem._native.bfc cimport (
    Bfc, bfc_expect_free, bfc_free, Chunk, CHUNK_CACHED, CHUNK_USED, handle_of, QUANTUM_BITS,
    round_to_quantum,
)
from gpumem._support.atomics cimport (
    head_take, head_try, load32, load64, locked_add64, publish64, publish8, publish_pointer,
    published_pointer, store32, store64, store8,
)
from gpumem._support.lock cimport (
    lock_acquire, lock_release, owner_enter, owner_is_biased, owner_leave, owner_lock_init,
    visitor_enter, visitor_leave,
)
from gpumem._support.memory cimport lines_alloc


cdef extern from "thread_cache.h" nogil:
    void mark_retain(ThreadMark* mark)
    void mark_drop(ThreadMark* mark)
    bint mark_ended(const ThreadMark* mark)
    ThreadMark* thread_mark()
    void* cache_remembered(uint64_t serial)
    void cache_remember(uint64_t serial, void* cache)


cdef bint biased = owner_is_biased()

# ---- the fast path -------------------------------------------------------------------------------

cdef ThreadCache* cache_find(const ArenaCore* arena) noexcept nogil:
    return <ThreadCache*>cache_remembered(arena.serial)


cdef bint cache_allocate(ArenaCore* arena, ThreadCache* cache, uint64_t requested,
                         uint32_t stream_slot, Block* block) noexcept nogil:
    cdef uint64_t size = round_to_quantum(requested)
    cdef bint taken = True
    owner_enter(&cache.lock)
    # A stack first: its top was freed last, so it is the warmest. Then the one block beside the
    # stacks. `collect` comes last, because it may take the arena lock for what overflows; larger
    # sizes never need it, since other threads free those to the table.
    if size <= CACHED_BYTES and pop(arena, cache, stream_slot, size, block):
        reuse(arena, cache, cached_table(arena), requested, block)
    # Above LAST_BYTES only with several streams' memory in the table, or if it does not pack:
    # otherwise a search places the block lower.
    elif (cache.last_size == size and cache.last_slot == stream_slot
          and (size <= LAST_BYTES or not arena.table.packs
               or load32(&arena.table.bins_filled) > 1)):
        allocate_last(arena, cache, requested, block)
    elif size <= CACHED_BYTES and load64(&cache.remote):
        collect(arena, cache)
        taken = pop(arena, cache, stream_slot, size, block)
        if taken:
            reuse(arena, cache, cached_table(arena), requested, block)
    else:
        taken = False
    owner_leave(&cache.lock)
    return taken


cdef void cache_free_own(ArenaCore* arena, ThreadCache* cache, Bfc* table, Chunk* chunk,
                         uint32_t index) noexcept nogil:
    cdef uint64_t requested
    owner_enter(&cache.lock)
    requested = chunk.requested
    chunk.epoch = stamp_free(&arena.streams[chunk.stream_slot])
    # Marked before it can be found: from here on the old handle is stale.
    store8(&chunk.state, CHUNK_CACHED)
    if not stack(arena, cache, table, chunk, index):
        replace_last(arena, cache, table, chunk, index)
    note_freed(arena, cache, table, chunk, requested)
    owner_leave(&cache.lock)


# ---- one function per change of state ------------------------------------------------------------

cdef inline bint pop(ArenaCore* arena, ThreadCache* cache, uint32_t stream_slot, uint64_t size,
                     Block* block) noexcept nogil:
    # Takes the chunk that was put on its stack last.
    cdef uint64_t quanta = size >> QUANTUM_BITS
    cdef Stacks* stacks = stacks_now(cache, stream_slot)
    if stacks == NULL or stacks.head[quanta] == 0:
        return False
    block.handle = take_top(cached_table(arena), stacks, quanta)
    return True


cdef inline uint32_t take_top(const Bfc* table, Stacks* stacks, uint64_t quanta) noexcept nogil:
    # The index of a chunk from a stack that is not empty. Stacks hold index + 1, so that fresh
    # memory is empty stacks.
    cdef uint32_t index = stacks.head[quanta] - 1
    store32(&stacks.head[quanta], table.chunks[index].bin_next)
    # `depth` bounds the stack, `chunks` lets a flush skip stacks that are empty.
    stacks.depth[quanta] -= 1
    stacks.chunks -= 1
    return index


cdef inline void allocate_last(ArenaCore* arena, ThreadCache* cache, uint64_t requested,
                               Block* block) noexcept nogil:
    block.handle = cache.last & ~<uint32_t>IN_SMALL
    store64(&cache.last_size, 0)
    reuse(arena, cache, table_of(arena, cache.last), requested, block)


cdef inline void reuse(ArenaCore* arena, ThreadCache* cache, Bfc* table, uint64_t requested,
                       Block* block) noexcept nogil:
    # The chunk changes from cached to used; its index is in block.handle.
    cdef uint32_t index = <uint32_t>block.handle
    cdef Chunk* chunk = &table.chunks[index]
    store64(&cache.cached_bytes, cache.cached_bytes - chunk.size)
    if cache.cached_bytes < cache.min_cached:
        cache.min_cached = cache.cached_bytes
    note_requested(arena, cache, table, requested)
    cache.allocs += 1
    chunk.requested = requested
    gm_set_home(&chunk.bin_prev, cache)
    # The generation first: a handle of before must not match a chunk that is used again.
    store32(&chunk.generation, chunk.generation + 1)
    store8(&chunk.state, CHUNK_USED)
    block.address = chunk.address
    block.size = chunk.size
    block.handle = handle_of(table, index) | (IN_SMALL if table == &arena.small else 0)


cdef inline void note_requested(ArenaCore* arena, ThreadCache* cache, const Bfc* table,
                                uint64_t change) noexcept nogil:
    if table == &arena.small:
        cache.requested_small += change
    else:
        cache.requested += change


cdef inline void note_freed(ArenaCore* arena, ThreadCache* cache, const Bfc* table,
                            Chunk* chunk, uint64_t requested) noexcept nogil:
    # Used to cached; the chunk belongs to this cache now, and what was requested is counted.
    store64(&cache.frees, cache.frees + 1)      # in one piece: caches_count_frees reads it
    note_requested(arena, cache, table, 0 - requested)
    chunk.bin_prev = 0
    # In one store, as at every change: growth reads it without the lock.
    store64(&cache.cached_bytes, cache.cached_bytes + chunk.size)


cdef inline bint stack(ArenaCore* arena, ThreadCache* cache, const Bfc* table, Chunk* chunk,
                       uint32_t index) noexcept nogil:
    # Puts a cached chunk onto its stack; False if it is too large, or its stack is full.
    cdef uint64_t quanta = chunk.size >> QUANTUM_BITS
    cdef Stacks* stacks
    if quanta > CACHED_QUANTA or table != cached_table(arena):
        return False
    stacks = stacks_of(cache, chunk.stream_slot)
    if stacks == NULL or stacks.depth[quanta] == CACHED_DEPTH:
        return False
    chunk.bin_next = stacks.head[quanta]
    store32(&stacks.head[quanta], index + 1)
    stacks.depth[quanta] += 1
    stacks.chunks += 1
    return True


cdef inline void replace_last(ArenaCore* arena, ThreadCache* cache, Bfc* table,
                              const Chunk* chunk, uint32_t index) noexcept nogil:
    # A cached chunk becomes the one that was freed last.
    if cache.last_size:
        lock_acquire(&arena.lock)
        cache_publish(arena, cache)
        cache_free_last(arena, cache)
        lock_release(&arena.lock)
    bfc_expect_free(table, index)
    store64(&cache.last_size, chunk.size)
    cache.last_slot = chunk.stream_slot
    cache.last = index | (IN_SMALL if table == &arena.small else 0)


cdef void cache_free_last(ArenaCore* arena, ThreadCache* cache) noexcept nogil:
    if cache.last_size == 0:
        return
    free_published(arena, cache, table_of(arena, cache.last), cache.last & ~<uint32_t>IN_SMALL)
    store64(&cache.last_size, 0)


cdef inline void free_top(ArenaCore* arena, ThreadCache* cache, Stacks* stacks,
                          uint64_t quanta) noexcept nogil:
    free_published(arena, cache, cached_table(arena), take_top(cached_table(arena), stacks, quanta))


cdef inline void free_published(ArenaCore* arena, ThreadCache* cache, Bfc* table,
                                uint32_t index) noexcept nogil:
    # Cached to free, where the cache is published: its own sums and the arena's hold the chunk.
    cdef uint64_t size = table.chunks[index].size
    store64(&cache.cached_bytes, cache.cached_bytes - size)
    cache.min_cached -= size
    cache.published -= size
    store64(&arena.cached_bytes, arena.cached_bytes - size)
    release(table, index)


cdef bint cache_free_remote(ArenaCore* arena, ThreadCache* home_cache, Bfc* table,
                            uint32_t index) noexcept nogil:
    # Used to cached, by a thread that does not own the cache and takes no lock. The word counts the
    # list in its upper half; the lower half is the first index + 1, and IN_SMALL its table.
    cdef uint64_t seen = load64(&home_cache.remote)
    cdef uint32_t entry = (index + 1) | (IN_SMALL if table == &arena.small else 0)
    cdef Chunk* chunk = &table.chunks[index]
    if seen >> 32 >= REMOTE_DEPTH:
        return False
    # Without the lock, a copy of the table may be made at the same time. A reader that sees the
    # epoch, where a used chunk has what was requested, sees the state; and one that sees the state,
    # the link that keeps what was requested until the cache's owner counts it. Small blocks' bytes
    # fit into a link.
    store32(&chunk.bin_prev, <uint32_t>chunk.requested)
    publish8(&chunk.state, CHUNK_CACHED)
    publish64(&chunk.epoch, stamp_free(&arena.streams[chunk.stream_slot]))
    # The link is written before the entry is published, and again whenever another thread was
    # faster.
    store32(&chunk.bin_next, <uint32_t>seen)
    while not head_try(&home_cache.remote, &seen, ((seen >> 32) + 1) << 32 | entry):
        store32(&chunk.bin_next, <uint32_t>seen)
    return True


cdef void collect(ArenaCore* arena, ThreadCache* cache) noexcept nogil:
    # Caller holds the cache's lock. Moves blocks that other threads freed to the stacks, the
    # overflow to the table.
    cdef uint32_t entry = <uint32_t>head_take(&cache.remote)
    cdef uint32_t index
    cdef Bfc* table
    cdef Chunk* chunk
    while entry != 0:
        table = table_of(arena, entry)
        index = (entry & ~<uint32_t>IN_SMALL) - 1
        chunk = &table.chunks[index]
        entry = chunk.bin_next
        # Counted only now: the thread that freed it may not change this cache's counts.
        if stack(arena, cache, table, chunk, index):
            note_freed(arena, cache, table, chunk, chunk.bin_prev)
        else:
            lock_acquire(&arena.lock)
            cache_publish(arena, cache)
            locked_add64(&arena.stats.num_frees, 1)
            release(table, index)
            lock_release(&arena.lock)


cdef inline void release(Bfc* table, uint32_t index) noexcept nogil:
    # Caller holds both locks. The chunk changes from cached to free, and its requested bytes are
    # subtracted.
    cdef Chunk* chunk = &table.chunks[index]
    cdef uint64_t epoch = chunk.epoch
    chunk.requested = chunk.bin_prev
    bfc_free(table, index, chunk.stream_slot, epoch)


cdef inline Bfc* cached_table(ArenaCore* arena) noexcept nogil:
    # All cached chunks are of one table; the choice changes only while every cache is empty and
    # locked.
    return &arena.small if arena.small_below else &arena.table


cdef inline Stacks* stacks_of(ThreadCache* cache, uint32_t stream_slot) noexcept nogil:
    cdef uint32_t count = stream_slot + 8   # more than needed: a run of new streams grows it once
    cdef Stacks** stacks
    if stream_slot >= cache.slot_count:
        stacks = <Stacks**>realloc(cache.stacks, count * sizeof(Stacks*))
        if stacks == NULL:
            return NULL
        memset(stacks + cache.slot_count, 0, (count - cache.slot_count) * sizeof(Stacks*))
        cache.stacks = stacks
        cache.slot_count = count
    if cache.stacks[stream_slot] == NULL:
        cache.stacks[stream_slot] = <Stacks*>calloc(1, sizeof(Stacks))
    return cache.stacks[stream_slot]


# ---- all caches of an arena ----------------------------------------------------------------------

cdef void cache_flush(ArenaCore* arena) noexcept nogil:
    cdef ThreadCache* cache = cache_find(arena)
    if cache == NULL:
        return
    owner_enter(&cache.lock)
    flush(arena, cache)
    owner_leave(&cache.lock)


cdef bint cache_flush_other_streams(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    cdef ThreadCache* cache = cache_find(arena)
    cdef uint32_t other
    cdef bint held
    if cache == NULL:
        return False
    owner_enter(&cache.lock)
    lock_acquire(&arena.lock)
    cache_publish(arena, cache)
    held = cache.last_size != 0
    cache_free_last(arena, cache)
    for other in range(cache.slot_count):
        if other != stream_slot and flush_stacks(arena, cache, cache.stacks[other]):
            held = True
    lock_release(&arena.lock)
    owner_leave(&cache.lock)
    return held


cdef bint cache_free_some(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot) noexcept nogil:
    cdef ThreadCache* cache = cache_find(arena)
    cdef Stacks* stacks
    cdef bint held
    if cache == NULL:
        return False
    owner_enter(&cache.lock)
    stacks = stacks_now(cache, stream_slot)
    held = stacks != NULL and stacks.chunks != 0
    if held:
        lock_acquire(&arena.lock)
        cache_publish(arena, cache)
        free_some(arena, cache, stacks, round_to_quantum(nbytes) >> QUANTUM_BITS)
        lock_release(&arena.lock)
    owner_leave(&cache.lock)
    return held


cdef inline void free_some(ArenaCore* arena, ThreadCache* cache, Stacks* stacks,
                           uint64_t wanted) noexcept nogil:
    # `wanted` quanta. The largest are the fewest, and need the least that is free beside them.
    cdef uint64_t quanta = CACHED_QUANTA
    while wanted != 0 and stacks.chunks != 0:
        while stacks.head[quanta] == 0:
            quanta -= 1
        free_top(arena, cache, stacks, quanta)
        wanted -= min(wanted, quanta)


cdef bint cache_free_fitting(ArenaCore* arena, ThreadCache* cache, uint64_t size,
                             uint32_t stream_slot) noexcept nogil:
    # The deepest stack will be the last to run dry.
    cdef Stacks* stacks = stacks_now(cache, stream_slot)
    cdef uint64_t quanta, deepest
    cdef uint32_t depth = 0
    if stacks == NULL or stacks.chunks == 0:
        return False
    for quanta in range(size >> QUANTUM_BITS, CACHED_QUANTA + 1):
        if stacks.depth[quanta] > depth:
            depth = stacks.depth[quanta]
            deepest = quanta
    if depth != 0:
        free_top(arena, cache, stacks, deepest)
    return depth != 0


cdef bint caches_flush(ArenaCore* arena) noexcept nogil:
    cdef ThreadCache* cache
    cdef bint held = False
    lock_acquire(&arena.caches_lock)
    cache = arena.caches
    while cache != NULL:
        enter(cache)
        held |= flush(arena, cache)
        leave(cache)
        cache = cache.next
    lock_release(&arena.caches_lock)
    return held


cdef CacheCounts caches_counts(const ArenaCore* arena) noexcept nogil:
    # Caches are never taken off the list while the arena lives.
    cdef const ThreadCache* cache = <const ThreadCache*>published_pointer(&arena.caches)
    cdef CacheCounts counts = CacheCounts(0, 0, 0, 0)
    while cache != NULL:
        counts.nbytes += load64(&cache.cached_bytes)
        counts.requested += load64(&cache.requested) + load64(&cache.requested_small)
        counts.allocs += load64(&cache.allocs)
        counts.frees += load64(&cache.frees)
        cache = cache.next
    return counts


cdef uint64_t caches_count_frees(ArenaCore* arena) noexcept nogil:
    # The lock keeps a flush from moving counts during the sum.
    cdef uint64_t count
    lock_acquire(&arena.caches_lock)
    count = load64(&arena.stats.num_frees) + caches_counts(arena).frees
    lock_release(&arena.caches_lock)
    return count


cdef void caches_freeze(ArenaCore* arena) noexcept nogil:
    # Every cache's lock before the first arena lock, so that the order of locks holds.
    cdef ThreadCache* cache
    caches_hold(arena)
    cache = arena.caches
    while cache != NULL:
        flush(arena, cache)
        cache = cache.next


cdef void caches_hold(ArenaCore* arena) noexcept nogil:
    cdef ThreadCache* cache
    lock_acquire(&arena.caches_lock)
    cache = arena.caches
    while cache != NULL:
        enter(cache)
        cache = cache.next


cdef void caches_thaw(ArenaCore* arena) noexcept nogil:
    cdef ThreadCache* cache = arena.caches
    while cache != NULL:
        leave(cache)
        cache = cache.next
    lock_release(&arena.caches_lock)


cdef void enter(ThreadCache* cache) noexcept nogil:
    # Caller holds `caches_lock`, so that the owner stays the same.
    if cache.owner == thread_mark():
        owner_enter(&cache.lock)
    else:
        visitor_enter(&cache.lock)


cdef void leave(ThreadCache* cache) noexcept nogil:
    if cache.owner == thread_mark():
        owner_leave(&cache.lock)
    else:
        visitor_leave(&cache.lock)


cdef bint flush(ArenaCore* arena, ThreadCache* cache) noexcept nogil:
    # Caller holds the cache's lock. Returns whether there was any block.
    cdef bint held = cache.cached_bytes != 0 or load64(&cache.remote) != 0
    cdef uint32_t stream_slot
    # Blocks that other threads freed join the stacks, so that one pass over those frees everything.
    collect(arena, cache)
    lock_acquire(&arena.lock)
    cache_publish(arena, cache)
    cache_free_last(arena, cache)
    for stream_slot in range(cache.slot_count):
        flush_stacks(arena, cache, cache.stacks[stream_slot])
    arena.table.requested_in_use += cache.requested
    arena.small.requested_in_use += cache.requested_small
    cache.requested = 0
    cache.requested_small = 0
    move_count(&cache.allocs, &arena.stats.num_allocs)
    move_count(&cache.frees, &arena.stats.num_frees)
    lock_release(&arena.lock)
    return held


cdef inline void move_count(uint64_t* part, uint64_t* whole) noexcept nogil:
    # Cleared first: a reader that adds them up without a lock, the whole first, counts none twice.
    cdef uint64_t count = part[0]
    store64(part, 0)
    publish64(whole, whole[0] + count)


cdef bint flush_stacks(ArenaCore* arena, ThreadCache* cache, Stacks* stacks) noexcept nogil:
    # Frees the stacks of one stream, NULL if it has none; the cache is published. Returns whether
    # there was any block.
    cdef uint32_t quanta
    if stacks == NULL or stacks.chunks == 0:
        return False
    for quanta in range(1, CACHED_QUANTA + 1):
        while stacks.head[quanta] != 0:
            free_top(arena, cache, stacks, quanta)
    return True


# ---- creation and end ----------------------------------------------------------------------------

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
    # Finds the thread's own cache, forgotten for want of room, or a cache of a thread that ended.
    cdef ThreadCache* cache = arena.caches
    cdef ThreadCache* orphan = NULL
    while cache != NULL:
        if cache.owner == mark:
            return cache
        if orphan == NULL and mark_ended(cache.owner):
            orphan = cache
        cache = cache.next
    # The thread has none: it adopts the cache of a thread that has ended, with its blocks, so that
    # the number of caches is bounded by the threads that live at once.
    if orphan != NULL:
        mark_drop(orphan.owner)
        mark_retain(mark)
        orphan.owner = mark
    return orphan


cdef ThreadCache* add_cache(ArenaCore* arena, ThreadMark* mark) noexcept nogil:
    cdef ThreadCache* cache = <ThreadCache*>lines_alloc(sizeof(ThreadCache))
    if cache == NULL:
        return NULL
    owner_lock_init(&cache.lock, biased)
    mark_retain(mark)
    cache.owner = mark
    cache.next = arena.caches
    publish_pointer(<void**>&arena.caches, cache)
    return cache


cdef void caches_free(ArenaCore* arena) noexcept nogil:
    # No thread uses the arena any more, and no thread searches for its serial again.
    cdef ThreadCache* cache = arena.caches
    cdef ThreadCache* following
    cdef uint32_t stream_slot
    while cache != NULL:
        following = cache.next
        for stream_slot in range(cache.slot_count):
            free(cache.stacks[stream_slot])
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

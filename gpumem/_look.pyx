"""Counters of every kind of resource, without its locks; see _look.pxd."""

from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy, memset

from gpumem._arena_heap_types cimport DebugHeap, HEAP_FREED, HEAP_LIVE, HEAP_RESTING
from gpumem._arena_types cimport (
    LARGE_SPACE,
    SMALL_SPACE,
    STATE_CLOSED,
    STATE_SUSPENDED,
    ArenaCore,
    ThreadCache,
)
from gpumem._ledger cimport BlockLedger, LedgerCounters
from gpumem._recorder cimport TAP_ARENA, TAP_LEDGER, Tap
from gpumem._support.atomics cimport load32, load64, published64, published_pointer

cdef enum:
    MOST_LOOKS = 8


cdef bint look_at(Tap* tap, uint64_t* counters) noexcept nogil:
    cdef uint64_t[<int>LIVE_COUNTERS] before
    cdef int _look
    if is_closed(tap):
        return False
    look_once(tap, counters)
    for _look in range(MOST_LOOKS):
        memcpy(before, counters, sizeof(before))
        look_once(tap, counters)
        if memcmp(before, counters, sizeof(before)) == 0:
            break
    never_falls(&tap.told_allocs, &counters[<int>LIVE_NUM_ALLOCS])
    never_falls(&tap.told_frees, &counters[<int>LIVE_NUM_FREES])
    return True


cdef inline void never_falls(uint64_t* told, uint64_t* count) noexcept nogil:
    # A look that met a count on its way from a cache to its arena lacks it.
    count[0] = told[0] = max(told[0], count[0])


cdef bint is_closed(const Tap* tap) noexcept nogil:
    if tap.owner_is == TAP_ARENA:
        return load32(&(<const ArenaCore*>tap.owner).closed) == STATE_CLOSED
    return (<const BlockLedger*>tap.owner).closed


cdef void look_once(const Tap* tap, uint64_t* counters) noexcept nogil:
    memset(counters, 0, LIVE_COUNTERS * sizeof(uint64_t))
    if tap.owner_is == TAP_ARENA:
        look_at_arena(<const ArenaCore*>tap.owner, counters)
    elif tap.owner_is == TAP_LEDGER:
        look_at_ledger(<const BlockLedger*>tap.owner, counters)


# ---- arenas --------------------------------------------------------------------------------------

cdef void look_at_arena(const ArenaCore* arena, uint64_t* counters) noexcept nogil:
    counters[<int>LIVE_LIMIT] = load64(&arena.settings.max_mem)
    counters[<int>LIVE_IN_USE] = load64(&arena.table.in_use) + load64(&arena.small.in_use)
    counters[<int>LIVE_REQUESTED_IN_USE] = (load64(&arena.table.requested_in_use)
                                            + load64(&arena.small.requested_in_use))
    # Before the caches' parts of them: see move_count in _arena_cache.
    counters[<int>LIVE_NUM_ALLOCS] = published64(&arena.stats.num_allocs)
    counters[<int>LIVE_NUM_FREES] = published64(&arena.stats.num_frees)
    subtract_caches(arena, counters)
    if arena.heap != NULL:
        show_users_part(arena.heap, counters)
    counters[<int>LIVE_RESERVED] = reserved(arena)
    counters[<int>LIVE_MAX_IN_USE] = max(load64(&arena.stats.max_in_use),
                                         counters[<int>LIVE_IN_USE])
    counters[<int>LIVE_MAX_RESERVED] = load64(&arena.stats.max_reserved)
    counters[<int>LIVE_NUM_RESERVES] = load64(&arena.stats.num_reserves)
    counters[<int>LIVE_NUM_EXTENSIONS] = load64(&arena.stats.num_extensions)
    counters[<int>LIVE_NUM_SHRINKAGES] = load64(&arena.stats.num_shrinkages)
    counters[<int>LIVE_MAX_ALLOC_SIZE] = load64(&arena.stats.max_alloc_size)
    counters[<int>LIVE_PAGES_MOVED] = (load64(&arena.spaces[LARGE_SPACE].moved)
                                       + load64(&arena.spaces[SMALL_SPACE].moved))
    counters[<int>LIVE_DRIVER_CALLS] = (load64(&arena.backing.calls)
                                        + load64(&arena.shareable.calls)
                                        + load64(&arena.stats.events_recorded)
                                        + load64(&arena.stats.events_asked)
                                        + load64(&arena.stats.events_waited))
    counters[<int>LIVE_SUSPENDED_BYTES] = load64(&arena.saved_bytes)


cdef void subtract_caches(const ArenaCore* arena, uint64_t* counters) noexcept nogil:
    # What rests in caches is not in use, and what they served is not in the arena's counts yet.
    # Caches are never taken off the list while the arena lives.
    cdef const ThreadCache* cache = <const ThreadCache*>published_pointer(&arena.caches)
    cdef uint64_t kept = 0
    cdef uint64_t requested = counters[<int>LIVE_REQUESTED_IN_USE]
    while cache != NULL:
        kept += load64(&cache.cached_bytes)
        requested += load64(&cache.requested) + load64(&cache.requested_small)
        counters[<int>LIVE_NUM_ALLOCS] += load64(&cache.allocs)
        counters[<int>LIVE_NUM_FREES] += load64(&cache.frees)
        cache = cache.next
    # Sums of different moments: neither may wrap below zero.
    counters[<int>LIVE_IN_USE] -= min(kept, counters[<int>LIVE_IN_USE])
    counters[<int>LIVE_REQUESTED_IN_USE] = min(requested, counters[<int>LIVE_IN_USE])


cdef void show_users_part(const DebugHeap* heap, uint64_t* counters) noexcept nogil:
    # What a debug heap keeps back is in use for the arena alone.
    cdef uint64_t held = load64(&heap.held[<int>HEAP_FREED]) + load64(&heap.held[<int>HEAP_RESTING])
    counters[<int>LIVE_IN_USE] -= min(held, counters[<int>LIVE_IN_USE])
    counters[<int>LIVE_REQUESTED_IN_USE] = min(load64(&heap.asked[<int>HEAP_LIVE]),
                                               counters[<int>LIVE_IN_USE])
    counters[<int>LIVE_NUM_FREES] += (load64(&heap.count[<int>HEAP_FREED])
                                      + load64(&heap.count[<int>HEAP_RESTING]))


cdef uint64_t reserved(const ArenaCore* arena) noexcept nogil:
    if load32(&arena.closed) == STATE_SUSPENDED:
        return load64(&arena.shareable.mapped_bytes)
    return (load64(&arena.table.reserved) + load64(&arena.small.reserved)
            + load64(&arena.persistent.reserved) - load64(&arena.persistent.in_use))


# ---- resources whose every block is a call -------------------------------------------------------

cdef void look_at_ledger(const BlockLedger* ledger, uint64_t* counters) noexcept nogil:
    # What the driver keeps in a pool besides is its own to say: asking it might block.
    cdef const LedgerCounters* now = &ledger.counters
    counters[<int>LIVE_LIMIT] = load64(&ledger.limit)
    counters[<int>LIVE_IN_USE] = load64(&now.in_use)
    counters[<int>LIVE_REQUESTED_IN_USE] = load64(&now.requested)
    counters[<int>LIVE_RESERVED] = counters[<int>LIVE_IN_USE] + load64(&now.waiting)
    counters[<int>LIVE_MAX_IN_USE] = load64(&now.max_in_use)
    counters[<int>LIVE_MAX_RESERVED] = load64(&now.max_held)
    counters[<int>LIVE_NUM_ALLOCS] = load64(&now.num_allocs)
    counters[<int>LIVE_NUM_FREES] = load64(&now.num_frees)
    counters[<int>LIVE_NUM_RESERVES] = load64(&now.num_reserves)
    counters[<int>LIVE_NUM_SHRINKAGES] = load64(&now.num_shrinks)
    counters[<int>LIVE_MAX_ALLOC_SIZE] = load64(&now.max_block)
    counters[<int>LIVE_DRIVER_CALLS] = load64(&now.calls)

"""Allocation after the fast path, and the commit of a virtual tensor, which makes room likewise."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.arena cimport (
    arenas_release_before_growth, arenas_release_retired, release_once_quiet,
)
from gpumem._native.arena.bookkeeping cimport (
    charge_request, finish_allocate, note_allocate, note_event,
)
from gpumem._native.arena.debug_heap.heap cimport heap_allocate
from gpumem._native.arena.detours cimport arena_charge_block
from gpumem._native.arena.family cimport tag_next
from gpumem._native.arena.growth cimport (
    allocate_lower, bound_idle, grow, memory_is_out, release_before_growth, release_surplus,
    refund_may_help, shrink_may_help, wait_for_streams,
)
from gpumem._native.arena.release cimport release_all_idle, release_retired
from gpumem._native.arena.spans cimport span_take, spans_poll
from gpumem._native.arena.streams cimport (
    allocate_behind, find_idle, release_completed, switch_stream,
)
from gpumem._native.arena.thread_cache cimport (
    cache_find, cache_flush_other_streams, cache_free_some, cache_publish, caches_flush,
)
from gpumem._native.arena.types cimport (
    ALLOCATE_ALONE, ALLOCATE_INTERRUPTIBLE, ALLOCATE_NO_WAIT, arena_admits, ARENA_ASLEEP,
    ARENA_CAPTURING, ARENA_CLOSED, ARENA_DEAD, ARENA_IN_USE, ARENA_INTERRUPTED, ARENA_NO_METADATA,
    ARENA_OK, ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, ArenaCore, ArenaSpan, Block, is_graph_pool,
    REUSE_WAIT, table_for, ThreadCache,
)
from gpumem._native.bfc cimport (
    Bfc, bfc_allocate, bfc_allocate_across, BFC_MAY_SWAP, BFC_NO_METADATA, BFC_OK, MAX_BYTES, NIL,
    round_to_quantum, SLOT_RELEASED,
)
from gpumem._native.driver cimport (
    context_is_dead, context_relax, context_restore, CUgraph, CUresult, CUstreamCaptureMode,
    stream_captures,
)
from gpumem._native.pages cimport span_lacks
from gpumem._support.atomics cimport load64, sum_add
from gpumem._support.clock cimport clock_ns
from gpumem._support.events cimport is_recorded, REC_FAILURE
from gpumem._support.lock cimport lock_acquire, lock_release


cdef enum Search:           # of the table
    SEARCH_FREE             # for a chunk that is free for the stream
    SEARCH_UNFINISHED       # for a chunk of another stream, which the stream waits for
    SEARCH_ACROSS           # for chunks side by side that together hold the block


# ---- The steps of an allocation ------------------------------------------------------------------

cdef int allocate_step_by_step(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                               uint32_t flags, Block* block) noexcept nogil:
    # Cheapest first, each step only if those before it found no room. No lock is held on entry, nor
    # between two steps.
    cdef bint own_region = flags & ALLOCATE_ALONE
    cdef bint captures, freed, quiet
    cdef uint64_t until = 0
    cdef CUstreamCaptureMode mode
    cdef int status, waited
    if arena.settings.passthrough and not own_region:
        # enable=False: one driver allocation per block.
        own_region = True
        if stream_slot_captures(arena, stream_slot):
            return ARENA_CAPTURING
    while True:
        if not own_region:
            # 1. Close the epoch of the stream served before: an event after its frees must be
            #    recorded before other streams queue more work, and step 3 polls it.
            switch_stream(arena, stream_slot)

            # 2. Search the table as it is. The fast path leaves this undone when an event was due.
            status = allocate_from_table(arena, nbytes, stream_slot, SEARCH_FREE, block)
            if status != ARENA_OVER_LIMIT:
                return status

            # 3. Poll the events of the other streams, after this thread's cache has freed their
            #    blocks: memory of completed work is free for every stream. Not for a capturing
            #    stream, because its graph would use that memory at every launch.
            captures = stream_slot_captures(arena, stream_slot)
            freed = cache_flush_other_streams(arena, stream_slot)
            if not captures and release_completed(arena, stream_slot):
                freed = True
            if freed:
                status = allocate_from_table(arena, nbytes, stream_slot, SEARCH_FREE, block)
                if status != ARENA_OVER_LIMIT:
                    return status

            # 4. Empty the threads' caches: cached blocks count as used, and their neighbours can
            #    only merge with them once they are free. First the thread's own cache, and only as
            #    many blocks as the request needs, because for each block that its cache lost the
            #    thread has to search again. Then all caches: a flush interrupts their threads.
            while cache_free_some(arena, nbytes, stream_slot):
                status = allocate_from_table(arena, nbytes, stream_slot, SEARCH_FREE, block)
                if status != ARENA_OVER_LIMIT:
                    return status
            if caches_flush(arena):
                if not captures:
                    release_completed(arena, stream_slot)   # for blocks of other streams
                status = allocate_from_table(arena, nbytes, stream_slot, SEARCH_FREE, block)
                if status != ARENA_OVER_LIMIT:
                    return status

            # A capturing stream ends here: the next steps wait for events and reserve memory, which
            # its graph would use at every launch, too. A graph pool has to serve it.
            if captures:
                return ARENA_CAPTURING

            # 5. Under "wait": allocate a block with unfinished work, and let the stream wait for
            #    that work on the device. It delays the stream, so completed memory is preferred.
            if arena.settings.reuse == REUSE_WAIT:
                status = allocate_from_table(arena, nbytes, stream_slot, SEARCH_UNFINISHED, block)
                if status == ARENA_OK or status == ARENA_OVER_BUDGET:
                    return status
        else:
            publish_cached(arena)   # as each search does

        # 6. The driver, one thread at a time. Arenas without references and regions of freed
        #    persistent blocks are released first, so that their memory neither counts in max_mem
        #    nor is missing for the growth. Memory that the driver releases only when the device is
        #    idle is released here only if no stream is at work, and only before more of its kind
        #    is allocated.
        mode = context_relax(arena.context)
        quiet = arenas_release_before_growth(arena, nbytes, flags)
        lock_acquire(&arena.grow_lock)
        release_retired(arena, quiet)

        # 7. Poll and search again, because another thread may have grown while this one waited for
        #    the lock, and an event that step 3 recorded on an idle stream takes microseconds; also
        #    for chunks side by side that together hold the block. Then grow: a new region, or pages
        #    that are made or moved. Where regions are exact, idle ones that would be too many are
        #    released before.
        status = ARENA_OVER_LIMIT
        if arena.settings.exact:
            bound_idle(arena, nbytes, quiet)
        if not own_region:
            release_before_growth(arena, nbytes, stream_slot)
            status = allocate_from_table(arena, nbytes, stream_slot, SEARCH_FREE, block)
        if not own_region and status == ARENA_OVER_LIMIT:
            status = allocate_from_table(arena, nbytes, stream_slot, SEARCH_ACROSS, block)
        if status != ARENA_OK and status != ARENA_CLOSED and status != ARENA_ASLEEP:
            if arena.settings.exact and quiet:
                release_surplus(arena, nbytes)
            status = grow(arena, nbytes, stream_slot, own_region, flags, block)

        # 8. Release regions and pages that hold no block and have no unfinished work, also those
        #    of other tags, then grow once more. Not earlier: idle memory is there to be used again.
        #    Steps 3 and 4 have searched for it, unless the block has a region of its own.
        if shrink_may_help(arena, nbytes, status):
            if own_region:
                find_idle(arena)
            if release_all_idle(arena) != 0:
                sum_add(&arena.num_retries, 1)
                status = grow(arena, nbytes, stream_slot, own_region, flags, block)
        lock_release(&arena.grow_lock)
        context_restore(arena.context, mode)

        # 9. Wait on the host until work of other streams, or of other tags, has completed, at most
        #    for `oom_wait`, and begin anew. Last, because it stops this thread; without a lock,
        #    because the work may depend on what other threads still have to queue. A debug heap
        #    waits by itself.
        # 10. Release memory that the driver releases only when the device is idle, such as pinned
        #     memory, in the remaining time, and begin anew.
        # 11. Refuse: `status` is the reason.
        if flags & ALLOCATE_NO_WAIT or not memory_is_out(arena, nbytes, status):
            return status
        sum_add(&arena.num_waits, 1)
        waited = wait_for_any(arena, nbytes, stream_slot, flags, &until)
        if waited == ARENA_OVER_LIMIT:
            waited = release_once_quiet(arena, status, flags, until)
        if waited != ARENA_OK:
            return ARENA_INTERRUPTED if waited == ARENA_INTERRUPTED else status


cdef int wait_for_any(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                      uint64_t* until) noexcept nogil:
    # Its own streams first; then those that used idle memory of the other tags.
    cdef int waited = wait_for_streams(arena, nbytes, stream_slot, flags, until)
    cdef ArenaCore* other = tag_next(arena, NULL)
    while other != NULL:
        if other != arena and waited == ARENA_OVER_LIMIT:
            waited = wait_for_streams(other, nbytes, SLOT_RELEASED, flags, until)
        other = tag_next(arena, other)
    return waited


cdef int allocate_from_table(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                             Search search, Block* block) noexcept nogil:
    # ARENA_OVER_LIMIT: no chunk fits. ARENA_OVER_BUDGET: a budget refuses the size of the chunk
    # with unfinished work.
    cdef int status = BFC_OK
    cdef int refused
    cdef uint32_t index
    cdef Bfc* table = table_for(arena, nbytes)
    cdef ThreadCache* cache = cache_find(arena)
    lock_acquire(&arena.lock)
    refused = arena_admits(arena)
    if refused != ARENA_OK:
        lock_release(&arena.lock)
        return refused
    refused = ARENA_OVER_LIMIT
    cache_publish(arena, cache)         # before the table changes, so that the peak is exact
    if search == SEARCH_UNFINISHED:
        index = allocate_behind(arena, table, nbytes, stream_slot, &refused)
    elif search == SEARCH_ACROSS:
        index = bfc_allocate_across(table, round_to_quantum(nbytes), nbytes, stream_slot, &status)
    else:
        index = bfc_allocate(table, round_to_quantum(nbytes), nbytes, stream_slot, &status)
        if status == BFC_MAY_SWAP:
            index = allocate_lower(arena, table, nbytes, stream_slot, &status)
    if index != NIL:
        finish_allocate(arena, cache, table, index, block)
    lock_release(&arena.lock)
    if index != NIL:
        return ARENA_OK
    return ARENA_NO_METADATA if status == BFC_NO_METADATA else refused


cdef void publish_cached(ArenaCore* arena) noexcept nogil:
    # Blocks that this thread has cached are not in use, so they are not in the peak either.
    lock_acquire(&arena.lock)
    cache_publish(arena, cache_find(arena))
    lock_release(&arena.lock)


cdef bint stream_slot_captures(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # Streams of a graph pool always capture, and the pool serves them.
    cdef uint64_t capture
    cdef CUgraph graph
    cdef CUresult refusal
    return not is_graph_pool(arena) and stream_captures(
        arena.context, arena.streams[stream_slot].handle, &capture, &graph, &refusal)


# ---- Debug heap, budget and recorder around them -------------------------------------------------

cdef int arena_allocate_slow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                             uint32_t flags, Block* block) noexcept nogil:
    cdef uint64_t until = 0
    cdef int status
    if context_is_dead(arena.context):
        return ARENA_DEAD
    while True:
        if nbytes > MAX_BYTES:
            status = ARENA_OVER_LIMIT
        elif arena.heap != NULL:
            status = allocate_guarded(arena, nbytes, stream_slot, flags | ALLOCATE_NO_WAIT, block)
        else:
            status = allocate_charged(arena, nbytes, stream_slot, flags, block)
        if not refund_may_help(arena, status, &until):
            break
    if not is_recorded(&arena.events):
        return status
    if status == ARENA_OK:
        note_allocate(arena, nbytes, stream_slot, block)
    elif status != ARENA_CAPTURING and status != ARENA_INTERRUPTED:     # neither is a refusal
        note_event(arena, REC_FAILURE, 0, nbytes, status, stream_slot, True)
    return status


cdef int allocate_guarded(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                          Block* block) noexcept nogil:
    # The heap waits for its quarantine as well as for streams: steps 9 and 10 follow here.
    cdef int waited
    cdef int status = heap_allocate(arena, nbytes, stream_slot, flags, allocate_charged, block)
    if not memory_is_out(arena, nbytes, status):
        return status
    waited = release_once_quiet(arena, status, flags, clock_ns() + arena.settings.oom_wait)
    if waited == ARENA_OK:
        return heap_allocate(arena, nbytes, stream_slot, flags, allocate_charged, block)
    return ARENA_INTERRUPTED if waited == ARENA_INTERRUPTED else status


cdef int allocate_charged(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                          Block* block) noexcept nogil:
    # A budget of bytes in use is charged first: a refusal must not cost any arena memory.
    cdef int status
    if arena.in_use_level == NULL:
        return allocate_step_by_step(arena, nbytes, stream_slot, flags, block)
    if not charge_request(arena, nbytes):
        return ARENA_OVER_BUDGET
    status = allocate_step_by_step(arena, nbytes, stream_slot, flags, block)
    return arena_charge_block(arena, nbytes, stream_slot, status, block)


# ---- a commit ------------------------------------------------------------------------------------

cdef int span_commit(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last,
                     Lack* lack) noexcept nogil:
    # The steps of an allocation that reaches the driver, see slow_path.
    cdef ArenaCore* arena = span.arena
    cdef CUstreamCaptureMode mode
    cdef bint stays
    cdef int status
    lack.missing = 0
    lack.completions = load64(&arena.completions)
    if context_is_dead(arena.context):
        return ARENA_DEAD
    mode = context_relax(arena.context)
    arenas_release_retired(False, &stays)
    lock_acquire(&arena.grow_lock)
    lack.missing = span_lacks(&span.pages, first, spare)
    status = take_ahead(span, first, spare, last)
    if lack.missing and shrink_may_help(arena, lack.missing, status):
        find_idle(arena)
        release_all_idle(arena)
        status = span_take(span, first, spare, spare)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return status


cdef int span_wait(ArenaSpan* span, int status, Lack* lack, uint64_t* until) noexcept nogil:
    cdef int waited
    if lack.missing and refund_may_help(span.arena, status, &lack.refunds_until):
        return ARENA_OK
    if lack.missing == 0 or not memory_is_out(span.arena, lack.missing, status):
        return status
    # Another thread's release may have ended since the commit was refused.
    if load64(&span.arena.completions) != lack.completions:
        return ARENA_OK
    waited = wait_for_streams(span.arena, lack.missing, SLOT_RELEASED, ALLOCATE_INTERRUPTIBLE,
                              until)
    return status if waited == ARENA_OVER_LIMIT else waited


cdef int take_ahead(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil:
    # Without the memory ahead, if that is refused. A commit that lacks nothing takes none.
    cdef int status = ARENA_IN_USE
    if span_lacks(&span.pages, first, spare) == 0:
        last = spare
    spans_poll(span.arena)
    if last > spare:
        status = span_take(span, first, spare, last)
    return span_take(span, first, spare, spare) if status != ARENA_OK else status

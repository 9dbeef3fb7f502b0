"""Sleep and wake of one arena."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free

from gpumem._native.arena.bookkeeping cimport arena_charge, arena_reconcile, note_reserved
from gpumem._native.arena.debug_heap.heap cimport heap_lock_drained, heap_unlock
from gpumem._native.arena.family cimport arena_drop, arenas_find, Found, pool_next
from gpumem._native.arena.release cimport release_idle_beside, trim_pages
from gpumem._native.arena.spans cimport spans_settle, spans_trim
from gpumem._native.arena.streams cimport drain_streams, free_all_pending, wait_for_device
from gpumem._native.arena.thread_cache cimport caches_flush
from gpumem._native.arena.types cimport (
    apart_from, ARENA_CLOSED, ARENA_DRIVER_REFUSED, ARENA_HALF_ASLEEP, arena_in_use, ARENA_IN_USE,
    arena_is_open, ARENA_NO_COPY, ARENA_OK, ARENA_OVER_LIMIT, arena_reserved_now, arena_state,
    ArenaCore, ArenaSpan, driver_refused, IN_SMALL, is_graph_pool, last_refusal, last_refused_call,
    SPACES, STATE_ASLEEP, STATE_CLOSED, STATE_FALLING, STATE_OPEN, table_of,
)
from gpumem._native.backing cimport Mapped
from gpumem._native.bfc cimport Bfc, BFC_OK, bfc_resolve, CHUNK_USED, handle_of, NIL, state_of
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, context_relax, context_restore, CUDA_SUCCESS,
    CUresult, CUstreamCaptureMode,
)
from gpumem._native.pages cimport (
    kept_for_sleep, orphan_add, Sleeper, sleeper_add_page, sleeper_add_piece, sleeper_forget,
    sleeper_forget_pages, sleeper_lacks, sleeper_release, sleeper_release_kept, sleeper_sleep,
    sleeper_wake, SleepPiece, space_drop_dormant, space_list_pages, space_map_kept, span_list_bytes,
    span_list_pages, span_uses, STORE_HOST, StorePlace,
)
from gpumem._support.atomics cimport load32, load64, store32, store64
from gpumem._support.lock cimport lock_acquire, lock_release, lock_try


cdef enum:
    OF_SPAN = 0x7FFFFFFFFFFFFFFF    # in place of a block's handle: of a virtual tensor
    FILE_PAGE = 4096            # bytes; in a file each arena's bytes begin at a multiple


# ---- an arena and its graph pools ----------------------------------------------------------------

cdef int arena_sleep(ArenaCore* arena, const StorePlace* place) noexcept nogil:
    # While memory is released, no thread examines the blocks of a debug heap.
    cdef int status
    if arena.heap == NULL:
        return sleep_with_pools(arena, place)
    heap_lock_drained(arena)
    status = sleep_with_pools(arena, place)
    heap_unlock(arena)
    return status


cdef int sleep_with_pools(ArenaCore* arena, const StorePlace* place) noexcept nogil:
    cdef StorePlace room_left
    cdef ArenaCore* pool
    cdef int alone, status
    if place != NULL:
        room_left = place[0]
    alone = sleep_alone(arena, NULL if place == NULL else &room_left)
    status = alone
    subtract_room(&room_left, arena)
    pool = pool_next(arena, NULL)
    while pool != NULL:
        if status == ARENA_OK:
            status = sleep_alone(pool, NULL if place == NULL else &room_left)
            status = note_pool_refusal(arena, pool, status)
            subtract_room(&room_left, pool)
        else:                       # it was not reached
            arena_turn(pool, STATE_FALLING, STATE_OPEN)
        pool = pool_next(arena, pool)
    if alone != ARENA_OK or status == ARENA_OK:
        return status
    if arena_wake(arena) != ARENA_OK:
        return ARENA_HALF_ASLEEP
    return ARENA_DRIVER_REFUSED if status == ARENA_HALF_ASLEEP else status


cdef int arena_wake(ArenaCore* arena) noexcept nogil:
    # First all memory and bytes, then the states. If one arena is refused, the memory of the others
    # is released again. The arena comes last: it is asleep as long as any of its graph pools.
    cdef ArenaCore* pool = pool_next(arena, NULL)
    cdef int status = ARENA_OK
    while pool != NULL and status == ARENA_OK:
        status = note_pool_refusal(arena, pool, restore_memory(pool))
        pool = pool_next(arena, pool)
    if pool != NULL:
        arena_drop(pool)
    if status == ARENA_OK:
        status = restore_memory(arena)
    pool = pool_next(arena, NULL)
    while pool != NULL:
        finish_wake(pool, status == ARENA_OK)
        pool = pool_next(arena, pool)
    if status == ARENA_OK:
        finish_wake(arena, True)
    return status


cdef int note_pool_refusal(ArenaCore* arena, const ArenaCore* pool, int status) noexcept nogil:
    # Callers read from the arena why a pool was refused. A closed pool has no memory.
    if status == ARENA_CLOSED:
        return ARENA_OK
    if status != ARENA_OK:
        driver_refused(arena, last_refusal(pool), last_refused_call(pool))
        store64(&arena.over_budget, load64(&pool.over_budget))
    return status


cdef void subtract_room(StorePlace* room_left, const ArenaCore* arena) noexcept nogil:
    cdef uint64_t nbytes = whole_pages(load64(&arena.sleeper.nbytes))
    room_left.offset += nbytes
    room_left.room -= min(room_left.room, nbytes)
    room_left.keep -= min(room_left.keep, nbytes)


cdef inline uint64_t whole_pages(uint64_t nbytes) noexcept nogil:
    return (nbytes + FILE_PAGE - 1) & ~<uint64_t>(FILE_PAGE - 1)


cdef SleepSums sleep_sums(ArenaCore* arena) noexcept nogil:
    cdef SleepSums sums = SleepSums(0, 0, 0, 0)
    cdef ArenaCore* pool = pool_next(arena, NULL)
    add_sums(arena, &sums)
    while pool != NULL:
        add_sums(pool, &sums)
        pool = pool_next(arena, pool)
    return sums


cdef void add_sums(const ArenaCore* arena, SleepSums* sums) noexcept nogil:
    sums.held += arena_reserved_now(arena)
    sums.copied += load64(&arena.sleeper.nbytes)
    sums.room += whole_pages(arena_in_use(arena) + load64(&arena.span_used))
    sums.shared_blocks += <int32_t>load32(<const uint32_t*>&arena.shared_blocks)


# ---- one of them ---------------------------------------------------------------------------------

cdef int sleep_alone(ArenaCore* arena, const StorePlace* place) noexcept nogil:
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef int status = ARENA_OK
    lock_acquire(&arena.grow_lock)
    if arena_state(arena) == STATE_CLOSED:
        status = ARENA_CLOSED
    elif arena_is_open(arena) and not arena.is_bare:
        status = ARENA_IN_USE       # a graph pool that was made since
    elif arena_is_open(arena) or arena_state(arena) == STATE_FALLING:
        set_state(arena, STATE_ASLEEP)
        status = go_to_sleep(arena, place)
        if (status == ARENA_NO_COPY and place != NULL and place.kind == STORE_HOST
                and arenas_release_kept(NULL)):
            sleeper_forget(&arena.sleeper)
            status = go_to_sleep(arena, place)
        settle(arena)
        if status != ARENA_OK and status != ARENA_HALF_ASLEEP:
            sleeper_forget(&arena.sleeper)
            set_state(arena, STATE_OPEN)
        arena_reconcile(arena)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return status


cdef int restore_memory(ArenaCore* arena) noexcept nogil:
    # With its memory and bytes, it still counts as asleep: only frees are allowed.
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef int status = ARENA_OK
    lock_acquire(&arena.grow_lock)
    if arena_state(arena) == STATE_CLOSED:
        status = ARENA_CLOSED
    elif arena_state(arena) == STATE_ASLEEP:
        status = wake(arena)
        settle(arena)
        arena_reconcile(arena)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return status


cdef void finish_wake(ArenaCore* arena, bint stays) noexcept nogil:
    lock_acquire(&arena.grow_lock)
    if arena_state(arena) == STATE_ASLEEP and stays:
        sleeper_forget(&arena.sleeper)
        set_state(arena, STATE_OPEN)
        lock_acquire(&arena.lock)
        note_reserved(arena)    # peaks may have been reset since
        lock_release(&arena.lock)
    elif arena_state(arena) == STATE_ASLEEP and arena.sleeper.copied == arena.sleeper.nbytes:
        # Not if an earlier refusal left bytes that are in no copy. Memory is released with its last
        # view.
        if drop_dormant(arena) == CUDA_SUCCESS and list_pages(arena):
            sleeper_release(&arena.sleeper)
        settle(arena)
    arena_reconcile(arena)
    lock_release(&arena.grow_lock)


cdef bint arena_turn(ArenaCore* arena, uint32_t before, uint32_t after) noexcept nogil:
    cdef bint turned
    lock_acquire(&arena.grow_lock)
    turned = arena_state(arena) == before
    if turned:
        set_state(arena, after)
    lock_release(&arena.grow_lock)
    return turned


cdef void set_state(ArenaCore* arena, int state) noexcept nogil:
    # Caller holds `grow_lock`.
    lock_acquire(&arena.lock)
    store32(&arena.state, state)
    lock_release(&arena.lock)


# ---- going to sleep ------------------------------------------------------------------------------

cdef int go_to_sleep(ArenaCore* arena, const StorePlace* place) noexcept nogil:
    cdef Sleeper* sleeper = &arena.sleeper
    cdef const char* call = NULL
    # Work of any stream may use a live block.
    cdef CUresult code = wait_for_device(arena)
    if code != CUDA_SUCCESS:
        return driver_refused(arena, code, "cuCtxSynchronize")
    free_completed(arena)
    caches_flush(arena)
    trim_pages(arena)
    spans_trim(arena)
    name_sleeper(arena)
    code = drop_dormant(arena)
    if code != CUDA_SUCCESS:
        return abort_sleep(arena, driver_refused(arena, code, "cuMemUnmap"))
    if not list_pages(arena) or place != NULL and not list_blocks(arena):
        return abort_sleep(arena, ARENA_NO_COPY)
    code = sleeper_sleep(sleeper, place, &call)
    if code == CUDA_SUCCESS:
        return ARENA_OK
    if sleeper.no_store and sleeper.copied == 0:
        return abort_sleep(arena, ARENA_NO_COPY)        # no memory was released yet
    return undo(arena, code, call)


cdef int undo(ArenaCore* arena, CUresult code, const char* call) noexcept nogil:
    # Released memory is restored. Should that be refused too, the arena stays asleep, with its
    # copy, and a wake can be tried.
    cdef const char* again = NULL
    cdef bint no_store = arena.sleeper.no_store
    cdef CUresult undone = sleeper_wake(&arena.sleeper, &again)
    if undone == CUDA_SUCCESS and no_store:
        return abort_sleep(arena, ARENA_NO_COPY)
    if undone == CUDA_SUCCESS:
        return abort_sleep(arena, driver_refused(arena, code, call))
    driver_refused(arena, undone, again)
    return ARENA_HALF_ASLEEP


cdef int abort_sleep(ArenaCore* arena, int status) noexcept nogil:
    # The sleep was refused with this status, and all memory is restored: maps the views again.
    cdef const char* call = NULL
    cdef CUresult code = map_kept(arena, &call)
    if code == CUDA_SUCCESS:
        return status
    driver_refused(arena, code, call)
    return ARENA_HALF_ASLEEP


cdef void free_completed(ArenaCore* arena) noexcept nogil:
    # No work is queued. Streams of a graph pool work again at every launch.
    if not is_graph_pool(arena):
        drain_streams(arena, NULL)
        free_all_pending(arena)


cdef CUresult drop_dormant(ArenaCore* arena) noexcept nogil:
    # Unmaps views left from before a move; the pages keep their memory and place. A wake restores
    # the views of a graph pool with its memory.
    cdef CUresult code = context_enter(arena.context)
    cdef int i
    if code != CUDA_SUCCESS:
        return code
    for i in range(SPACES if arena.settings.paged else 0):
        if code == CUDA_SUCCESS:
            code = space_drop_dormant(&arena.spaces[i], &arena.lock)
    context_leave(arena.context)
    return code


cdef CUresult map_kept(ArenaCore* arena, const char** call) noexcept nogil:
    cdef CUresult code
    cdef int i
    if not arena.settings.paged or not is_graph_pool(arena):
        return CUDA_SUCCESS
    code = context_enter(arena.context)
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    for i in range(SPACES):
        if code == CUDA_SUCCESS:
            code = space_map_kept(&arena.spaces[i], call)
    context_leave(arena.context)
    return code


# ---- waking --------------------------------------------------------------------------------------

cdef int wake(ArenaCore* arena) noexcept nogil:
    cdef const char* call = NULL
    cdef uint64_t lacks
    cdef CUresult code
    cdef int status
    # Memory that was freed during the sleep has no work queued on it, and is not held.
    caches_flush(arena)
    free_completed(arena)
    trim_pages(arena)
    if not list_pages(arena):
        return ARENA_NO_COPY
    # Limit and budget before the driver: a refusal then leaves the arena asleep, as it was.
    lacks = sleeper_lacks(&arena.sleeper)
    status = arena_charge(arena, lacks)
    if status == ARENA_OVER_LIMIT:
        # Other tags may have grown since: their idle memory is released.
        release_idle_beside(arena)
        status = arena_charge(arena, lacks)
    if status != ARENA_OK:
        return status
    code = sleeper_wake(&arena.sleeper, &call)
    if code == CUDA_SUCCESS:
        code = map_kept(arena, &call)
    return ARENA_OK if code == CUDA_SUCCESS else driver_refused(arena, code, call)


# ---- what sleeps ---------------------------------------------------------------------------------

cdef void name_sleeper(ArenaCore* arena) noexcept nogil:
    arena.sleeper.context = arena.context
    arena.sleeper.access = &arena.access
    arena.sleeper.calls = &arena.backing.calls
    arena.sleeper.events = &arena.events
    arena.sleeper.owner = arena
    arena.sleeper.is_live = is_live
    arena.sleeper.orphan = keep_orphan


cdef bint list_pages(ArenaCore* arena) noexcept nogil:
    cdef bint listed = True
    cdef int i
    cdef Mapped* region = arena.backing.mapped
    cdef ArenaSpan* span = arena.spans
    sleeper_forget_pages(&arena.sleeper)
    for i in range(SPACES if arena.settings.paged else 0):
        listed = listed and space_list_pages(&arena.spaces[i], &arena.sleeper)
    while region != NULL and listed:
        # One without a handle that is not asleep is being released: its mapping keeps the memory.
        if region.memory or region.asleep:
            region.asleep = True
            listed = sleeper_add_page(&arena.sleeper, region.address, region.nbytes, &region.memory)
        region = region.next
    while span != NULL and listed:
        listed = span_list_pages(&span.pages, &arena.sleeper)
        span = span.next
    return listed


cdef void settle(ArenaCore* arena) noexcept nogil:
    # Regions and virtual tensors note what memory they have now; pages of blocks need no note.
    cdef Mapped* region = arena.backing.mapped
    while region != NULL:
        region.asleep = region.asleep and region.memory == 0
        region = region.next
    spans_settle(arena)


cdef bint list_blocks(ArenaCore* arena) noexcept nogil:
    # Listed under the lock. Blocks can only be freed afterwards, which their generations show.
    cdef bint listed
    cdef const ArenaSpan* span = arena.spans
    lock_acquire(&arena.lock)
    listed = list_table(arena, &arena.table, 0) and list_table(arena, &arena.small, IN_SMALL)
    lock_release(&arena.lock)
    while span != NULL and listed:
        listed = span_list_bytes(&span.pages, &arena.sleeper, OF_SPAN)
        span = span.next
    return listed


cdef bint list_table(ArenaCore* arena, const Bfc* table, uint64_t mark) noexcept nogil:
    # Regions that lie apart stay as they are.
    cdef uint32_t region, index
    for region in range(table.region_count):
        if (table.regions[region].size == 0
                or apart_from(arena, table.regions[region].address) != NULL):
            continue
        index = table.regions[region].first
        while index != NIL:
            if state_of(table, index) == CHUNK_USED and not sleeper_add_piece(
                    &arena.sleeper, table.chunks[index].address, table.chunks[index].size,
                    handle_of(table, index) | mark):
                return False
            index = table.chunks[index].next
    return True


cdef bint is_live(void* owner, const SleepPiece* piece) noexcept nogil:
    cdef const Bfc* table = table_of(<ArenaCore*>owner, piece.block)
    cdef const ArenaSpan* span = (<ArenaCore*>owner).spans
    cdef uint32_t index
    if piece.block == OF_SPAN:
        while span != NULL and not span_uses(&span.pages, piece.address):
            span = span.next
        return span != NULL
    return bfc_resolve(table, piece.block & ~<uint64_t>IN_SMALL, &index) == BFC_OK


cdef void keep_orphan(void* owner, uint64_t memory) noexcept nogil:
    # Also for memory of regions: every arena has that list, and releases its memory at its end.
    cdef ArenaCore* arena = <ArenaCore*>owner
    arena.spaces[0].context = arena.context
    orphan_add(&arena.spaces[0], memory)


cdef uint64_t arenas_release_kept(const ArenaCore* owner) noexcept nogil:
    cdef uint64_t before = load64(&kept_for_sleep)
    cdef ArenaCore* arena
    cdef Found found
    cdef uint32_t i
    arenas_find(&found)
    for i in range(found.count):
        arena = found.arenas[i]
        if owner != NULL and (arena == owner or arena.sleeps_with == owner):
            lock_acquire(&arena.grow_lock)
        elif owner != NULL or context_is_dead(arena.context) or not lock_try(&arena.grow_lock):
            arena_drop(arena)
            continue
        if arena_is_open(arena):
            sleeper_release_kept(&arena.sleeper)
        lock_release(&arena.grow_lock)
        arena_drop(arena)
    free(found.arenas)
    return before - min(before, load64(&kept_for_sleep))


cdef void copy_forget(ArenaCore* arena) noexcept nogil:
    arena.sleeper.store.place.keep = 0
    sleeper_forget(&arena.sleeper)

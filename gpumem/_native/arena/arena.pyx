"""The life of an arena: its creation, limits, shrink, close and leases; and graph pools."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free

from gpumem._native.arena.bookkeeping cimport (
    arena_join_as, arena_level_init, check_level, check_tables, family_reserved, finish_allocate,
    note_allocate, note_event, notes_free,
)
from gpumem._native.arena.debug_heap.guards cimport heap_counts
from gpumem._native.arena.debug_heap.heap cimport heap_attach, heap_detach, heap_drain, heap_release
from gpumem._native.arena.debug_heap.types cimport DebugHeap
from gpumem._native.arena.detours cimport arena_free, arena_free_used, block_free_uncharged
from gpumem._native.arena.family cimport (
    arena_drop, arena_retain, arena_retire, arenas_find, arenas_take_retired, child_leave, Found,
    part_next, pool_join, tag_next, tag_now,
)
from gpumem._native.arena.growth cimport (
    backing_for, bound_idle, FIRST_PAUSE, LONGEST_PAUSE, pause, prepare_pages, shrink_may_help,
)
from gpumem._native.arena.release cimport (
    give_up_views, has_waiting, release_all_idle, release_idle, release_one, release_retired,
    release_waiting, trim_pages,
)
from gpumem._native.arena.sleep cimport arenas_release_kept, copy_forget
from gpumem._native.arena.spans cimport spans_forget, spans_sweep
from gpumem._native.arena.streams cimport (
    add_stream, complete_done_streams, complete_streams, destroy_events, drain_streams, find_idle,
    free_all_pending, leave_streams, slot_retain, streams_are_done, streams_are_idle, streams_free,
    streams_may_work, wait_for_frees,
)
from gpumem._native.arena.thread_cache cimport caches_flush, caches_free, caches_freeze, caches_thaw
from gpumem._native.arena.types cimport (
    ALLOCATE_NO_WAIT, apart_bytes, ARENA_DEAD, ARENA_DRIVER_REFUSED, arena_has_memory, ARENA_IN_USE,
    arena_in_use, ARENA_INTERRUPTED, arena_is_open, ARENA_NO_METADATA, ARENA_OK, ARENA_OVER_LIMIT,
    arena_reserved, arena_reserved_now, ARENA_STALE, ArenaCore, ArenaSettings, Block,
    EXTEND_SAME_AS_REQUESTED, family_level, IN_SMALL, is_graph_pool, LARGE_SPACE, PERSISTENT_SPACE,
    REUSE_NEVER, REUSE_WAIT, root_of, SHARED_BLOCK, SMALL_SPACE, SPACES, STATE_CLOSED, table_of,
)
from gpumem._native.backing cimport Backing, backing_init, HOST_PAGE, numa_init, THE_DEVICE
from gpumem._native.bfc cimport (
    Bfc, bfc_allocate_range, bfc_free_all, bfc_init, BFC_NO_METADATA, BFC_OK, bfc_resolve, NIL,
    round_to_quantum, SLOT_RELEASED, SPLIT_EXACT, SPLIT_NEVER, SPLIT_ORT, SPLIT_TIGHT,
)
from gpumem._native.budget cimport budget_drop, BUDGET_UNLIMITED, BudgetCore, release_idle_below
from gpumem._native.driver cimport (
    access_init, context_enter, context_is_dead, context_leave, context_relax, context_restore,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUgraph, CUresult, CUstream, CUstreamCaptureMode,
    CUuserObject,
)
from gpumem._native.pages cimport (
    budget_init, kept_for_sleep, pages_are_exportable, Space, space_create, space_destroy,
    space_reserves, space_restore,
)
from gpumem._support.atomics cimport count_add, count_now, load32, load64, store32, store64, sum_add
from gpumem._support.clock cimport clock_ns
from gpumem._support.events cimport (
    event_source_close, event_source_name, event_source_open, is_recorded, OWNER_ARENA, REC_SHRINK,
)
from gpumem._support.lease cimport Lease, lease_create, uses_free
from gpumem._support.lock cimport lock_acquire, lock_init, lock_release, lock_try
from gpumem._support.memory cimport lines_alloc
from gpumem._support.retired cimport Retired
from gpumem._support.streams cimport LEGACY_STREAM


cdef enum:
    # Bytes of addresses that a paged arena reserves first, for large blocks and for small ones.
    LARGE_RANGE = 17179869184
    SMALL_RANGE = 1073741824

cdef uint64_t serials = 0


# ---- the debug heap ------------------------------------------------------------------------------

cdef void arena_debug(ArenaCore* arena, DebugHeap* heap) noexcept nogil:
    heap_attach(arena, heap, block_free_for_heap)


cdef int block_free_for_heap(void* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    return block_free_uncharged(<ArenaCore*>arena, handle, stream_slot)


# ---- releasing memory ----------------------------------------------------------------------------

cdef int arena_shrink(ArenaCore* arena, bint after_work, uint64_t* released) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef bint stays
    if context_is_dead(arena.context):
        return ARENA_DEAD
    if after_work:
        caches_flush(arena)     # before it a stream does not know of the frees of cached blocks
        wait_for_frees(arena, NULL)
    # Quarantine, caches and completed epochs come first, so that their regions become idle.
    if arena.heap != NULL:
        heap_release(arena, 0)
    mode = context_relax(arena.context)
    arenas_release_retired(True, &stays)
    find_idle(arena)
    lock_acquire(&arena.grow_lock)
    released[0] = (release_retired(arena, True) + release_idle(arena, 1)
                   + release_waiting(arena))
    # Growth begins anew: earlier sizes belong to a peak that is over.
    arena.next_region = arena.settings.initial_growth_chunk
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    if is_recorded(&arena.events):
        note_event(arena, REC_SHRINK, 0, released[0], released[0], SLOT_RELEASED, True)
    return ARENA_OK


cdef int arena_prepare(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef bint stays
    cdef int status
    if context_is_dead(arena.context):
        return ARENA_DEAD
    mode = context_relax(arena.context)
    arenas_release_retired(False, &stays)
    lock_acquire(&arena.grow_lock)
    status = prepare_pages(arena, nbytes)
    if shrink_may_help(arena, nbytes, status):
        # Tried again also if nothing was released: memory that is idle now moves.
        find_idle(arena)
        release_all_idle(arena)
        status = prepare_pages(arena, nbytes)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return status


# ---- limit and peaks -----------------------------------------------------------------------------

cdef void arena_set_limit(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    # Without the grow lock: a growth under way may keep to the earlier limit. An allocation that
    # waits for memory tries again.
    store64(&family_level(arena).limit, nbytes or BUDGET_UNLIMITED)
    lock_acquire(&arena.lock)
    store64(&arena.completions, arena.completions + 1)
    lock_release(&arena.lock)


cdef void arena_reset_peaks(ArenaCore* arena) noexcept nogil:
    caches_flush(arena)
    store64(&arena.held_peak, family_reserved(arena))
    lock_acquire(&arena.lock)
    # Flushed above: cached bytes count as used until then.
    store64(&arena.stats.max_in_use, arena_in_use(arena))
    store64(&arena.span_peak, 0)
    store64(&arena.block_peak, 0)
    store64(&arena.stats.max_reserved, arena_reserved_now(arena))
    lock_release(&arena.lock)


# ---- creation and end ----------------------------------------------------------------------------

cdef ArenaCore* arena_create(const ArenaSettings* settings, Backing backing) noexcept nogil:
    cdef ArenaCore* arena = <ArenaCore*>lines_alloc(sizeof(ArenaCore))
    cdef uint64_t first = round_to_quantum(settings.initial_chunk)
    cdef uint32_t stream_slot
    if arena == NULL:
        return NULL
    lock_init(&arena.lock)
    lock_init(&arena.grow_lock)
    lock_init(&arena.caches_lock)
    arena.serial = sum_add(&serials, 1)
    arena.references = 1
    arena.settings = settings[0]
    arena.detour = 1 if settings.passthrough else 0
    arena.backing = backing
    arena.context = backing.context
    access_init(&arena.access, arena.context, backing.node)
    arena.backing.access = &arena.access
    if settings.paged:
        arena.backing.waits = False     # an unmap waits for nothing
    if settings.exact:
        arena.small_below = SHARED_BLOCK + 1
        arena.backing.granule = max(backing.granule, <uint64_t>HOST_PAGE)
    if settings.max_mem and first > settings.max_mem:
        first = round_to_quantum(settings.max_mem)
    arena.next_region = first
    if (not arena_level_init(arena)
            or bfc_init(&arena.table, SPLIT_EXACT if settings.exact else SPLIT_ORT
                        if settings.ort_split else SPLIT_TIGHT, settings.max_dead) != BFC_OK
            or bfc_init(&arena.small, SPLIT_TIGHT, settings.max_dead) != BFC_OK
            or bfc_init(&arena.persistent, SPLIT_TIGHT, settings.max_dead) != BFC_OK):
        forget(arena)
        return NULL
    arena.table.merge_released = settings.reuse != REUSE_NEVER
    arena.small.merge_released = arena.table.merge_released
    if add_stream(arena, <CUstream><uint64_t>LEGACY_STREAM, NULL, &stream_slot) != ARENA_OK:
        forget(arena)
        return NULL
    if settings.paged:
        arena.table.packs = True
        arena.table.mixes = settings.reuse == REUSE_WAIT
        create_space(arena, LARGE_SPACE, &arena.table, LARGE_RANGE)
        create_space(arena, SMALL_SPACE, &arena.small, SMALL_RANGE)
        create_space(arena, PERSISTENT_SPACE, &arena.persistent, LARGE_RANGE)
        budget_init(&arena.move_budget, settings.move_budget)
    slot_retain(arena, stream_slot)
    return arena


cdef void create_space(ArenaCore* arena, int number, Bfc* table,
                       uint64_t first_bytes) noexcept nogil:
    space_create(&arena.spaces[number], table, arena.context, &arena.access, &arena.backing.calls,
                 &arena.events, first_bytes, number != SMALL_SPACE)


cdef void forget(ArenaCore* arena) noexcept nogil:
    # Recorders first, because they read the arena from other threads.
    cdef int i
    event_source_close(&arena.events)
    notes_free(arena)
    if arena.heap != NULL:
        heap_detach(arena)
    forget_backing(arena)
    for i in range(SPACES):
        space_destroy(&arena.spaces[i])
    spans_forget(arena)
    child_leave(arena)
    streams_free(arena)
    bfc_free_all(&arena.table)
    bfc_free_all(&arena.small)
    bfc_free_all(&arena.persistent)
    copy_forget(arena)
    budget_drop(arena.level)
    budget_drop(arena.in_use_level)
    caches_free(arena)
    free(arena)


cdef void forget_backing(ArenaCore* arena) noexcept nogil:
    if arena.backing.forget != NULL and not context_is_dead(arena.context):
        arena.backing.forget(&arena.backing)


cdef bint arenas_release_retired(bint with_wait, bint* stays) noexcept nogil:
    # Destroys the arenas that finalizers left, then their parents, if these were the last to refer
    # to them. An arena with unfinished work stays for a later call.
    cdef bint any_released = False
    while release_retired_once(with_wait, stays):
        any_released = True
    return any_released


cdef bint arenas_release_before_growth(ArenaCore* arena, uint64_t nbytes,
                                       uint32_t flags) noexcept nogil:
    cdef bint exact = arena.settings.exact
    cdef bint stays
    arenas_release_retired(False, &stays)
    if (arena.settings.oom_wait == 0 or not backing_for(arena, flags).waits
            or not (stays or load32(&arena.retired) or exact)):
        return False
    # An arena of exact regions that holds twice its live peak waits for the streams.
    if not devices_are_quiet() and not (
            exact and not flags & ALLOCATE_NO_WAIT and bound_idle(arena, nbytes, False)
            and wait_for_quiet(0, clock_ns() + arena.settings.oom_wait) == ARENA_OK):
        return False
    arenas_release_retired(True, &stays)
    return True


cdef bint release_retired_once(bint with_wait, bint* stays) noexcept nogil:
    # Returns whether an arena was destroyed.
    cdef Retired* link = arenas_take_retired()
    cdef ArenaCore* arena
    cdef bint destroyed = False
    stays[0] = False
    while link != NULL:
        arena = <ArenaCore*>link.thing
        link = link.next
        if context_is_dead(arena.context):
            forget(arena)
        elif ((with_wait or not arena.backing.waits)
              and (not streams_may_work(arena)
                   or load64(&arena.context.waits_done) >= arena.end_wait)
              and release_all(arena, with_wait)):
            forget(arena)
            destroyed = True
        else:
            stays[0] = stays[0] or arena.backing.waits or apart_bytes(arena) != 0
            arena_retire(arena)
    return destroyed


cdef void arenas_release_after_work() noexcept nogil:
    cdef Retired* link = arenas_take_retired()
    cdef ArenaCore* arena
    cdef bint stays
    while link != NULL:
        arena = <ArenaCore*>link.thing
        link = link.next
        if not context_is_dead(arena.context):
            drain_streams(arena, NULL)
        arena_retire(arena)
    arenas_release_retired(True, &stays)


cdef bint release_all(ArenaCore* arena, bint with_wait) noexcept nogil:
    # Releases the memory of a retired arena; its work is done. False: some is left, for which the
    # driver waits. A debug heap now frees the blocks that its owners freed before.
    complete_streams(arena)
    if arena.heap != NULL:
        heap_drain(arena)
        complete_streams(arena)
    give_up_views(arena)
    release_memory(arena, with_wait)
    destroy_events(arena)
    destroy_events(arena)       # a second try for those that the driver refused
    if with_wait or apart_bytes(arena) == 0:
        return True
    if arena.settings.paged:
        trim_pages(arena)       # which needs no wait
    return False


# ---- all arenas: whether their work is done, and what they do not use ----------------------------

cdef bint devices_are_quiet() noexcept nogil:
    # An event after all work of a context would invalidate every capture in it.
    cdef Found found
    cdef bint quiet
    cdef size_t i
    arenas_find(&found)
    quiet = not found.failed
    for i in range(found.count):
        quiet = quiet and streams_are_idle(found.arenas[i])
        arena_drop(found.arenas[i])
    free(found.arenas)
    return quiet


cdef uint64_t arenas_release_idle(const BudgetCore* level, uint64_t missing,
                                  const BudgetCore* asking) noexcept nogil:
    # Releases idle memory of every arena but the requesting one, and of their tags. Idle memory of
    # a graph pool stays, because the graph writes there. Nothing is waited for.
    cdef uint64_t idle = 0
    cdef uint64_t released = 0
    cdef Found found
    cdef size_t i
    arenas_find(&found)
    for i in range(found.count):
        if charges(found.arenas[i], level, asking):
            idle += idle_bytes(found.arenas[i])
    for i in range(found.count):
        if idle >= missing and charges(found.arenas[i], level, asking):
            released += release_idle_memory(found.arenas[i])
        arena_drop(found.arenas[i])
    free(found.arenas)
    return released


cdef uint64_t idle_bytes(ArenaCore* arena) noexcept nogil:
    # Bytes that blocks do not use, in the arena and its tags: at least those that can be released.
    cdef uint64_t total = 0
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        total += unused_bytes(each)
        each = tag_next(arena, each)
    return total


cdef uint64_t unused_bytes(ArenaCore* arena) noexcept nogil:
    cdef uint64_t used, reserved
    caches_flush(arena)         # cached blocks count as used
    lock_acquire(&arena.lock)
    used, reserved = arena_in_use(arena), arena_reserved(arena)
    lock_release(&arena.lock)
    return reserved - min(used, reserved)


cdef bint charges(const ArenaCore* arena, const BudgetCore* level,
                  const BudgetCore* asking) noexcept nogil:
    # Tags and pools are visited with their parent. In a fork's child the parent's arenas stay as
    # they are, since another thread may have held their locks.
    cdef const BudgetCore* account = family_level(arena)
    if account == asking or arena.parent != NULL or context_is_dead(arena.context):
        return False
    while account != NULL and account != level:
        account = account.parent
    return account != NULL


cdef uint64_t release_idle_memory(ArenaCore* arena) noexcept nogil:
    # An arena that is growing is skipped: its thread may try to release memory of this one.
    cdef CUstreamCaptureMode mode
    cdef uint64_t released = 0
    mode = context_relax(arena.context)
    find_idle(arena)
    if lock_try(&arena.grow_lock):
        released = release_retired(arena, False) + release_all_idle(arena)
        lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return released


release_idle_below = arenas_release_idle


cdef int release_once_quiet(ArenaCore* arena, int status, uint32_t flags,
                            uint64_t until) noexcept nogil:
    # Only where the allocation's memory is of this kind: otherwise it would wait for memory of
    # other arenas.
    cdef CUstreamCaptureMode mode
    cdef uint64_t released
    cdef bint stays, kept
    cdef int waited
    if not backing_for(arena, flags).waits:
        return ARENA_OVER_LIMIT
    arenas_release_retired(False, &stays)
    kept = status == ARENA_DRIVER_REFUSED and load64(&kept_for_sleep) != 0
    if not stays and not kept and not has_waiting(arena):
        return ARENA_OVER_LIMIT
    waited = wait_for_quiet(flags, until)
    if waited != ARENA_OK:
        return waited
    mode = context_relax(arena.context)
    released = arenas_release_retired(True, &stays)
    lock_acquire(&arena.grow_lock)
    released += release_waiting(arena)
    lock_release(&arena.grow_lock)
    if kept:
        released += arenas_release_kept(NULL)
    context_restore(arena.context, mode)
    return ARENA_OK if released else ARENA_OVER_LIMIT


cdef int wait_for_quiet(uint32_t flags, uint64_t until) noexcept nogil:
    # The driver's own wait for the device has no bound, and a stream may wait for what this thread
    # does next.
    cdef uint64_t next_pause = FIRST_PAUSE
    cdef uint64_t now = clock_ns()
    while now < until:
        if devices_are_quiet():
            return ARENA_OK
        if pause(min(next_pause, until - now), flags):
            return ARENA_INTERRUPTED
        next_pause = min(next_pause * 2, <uint64_t>LONGEST_PAUSE)
        now = clock_ns()
    return ARENA_OVER_LIMIT


cdef void arena_leave(ArenaCore* arena) noexcept nogil:
    # NULL: the arena was not created.
    if arena != NULL and arena_is_open(arena) and not context_is_dead(arena.context):
        leave_streams(arena)


cdef int arena_close(ArenaCore* arena) noexcept nogil:
    cdef bint stays
    if context_is_dead(arena.context):
        store32(&arena.state, STATE_CLOSED)
        return ARENA_OK
    arenas_release_retired(arena.backing.waits, &stays)
    if arena.heap != NULL and heap_counts(arena.heap).live == 0:
        heap_drain(arena)
    lock_acquire(&arena.grow_lock)
    # Cached blocks count as used.
    caches_flush(arena)
    lock_acquire(&arena.lock)
    if is_used(arena):
        lock_release(&arena.lock)
        lock_release(&arena.grow_lock)
        return ARENA_IN_USE
    store32(&arena.state, STATE_CLOSED)
    lock_release(&arena.lock)
    give_up_views(arena)
    # Events, addresses and metadata stay until the last reference ends: another thread may be past
    # the check of `closed`; it finds them empty.
    release_memory(arena, True)
    if arena.settings.paged:
        trim_pages(arena)
    # Memory that the driver refused to take back is released once more with the last reference.
    if arena_reserved(arena) == 0:
        forget_backing(arena)
    lock_release(&arena.grow_lock)
    return ARENA_OK


cdef inline bint is_used(const ArenaCore* arena) noexcept nogil:
    return (arena.table.used_chunks or arena.small.used_chunks or count_now(&arena.graphs)
            or count_now(&arena.live_spans))


cdef bint is_in_use(ArenaCore* arena) noexcept nogil:
    # Blocks in a debug heap's quarantine count as used in the tables, and are not in use.
    cdef bint used
    caches_flush(arena)
    if arena.heap != NULL:
        return (heap_counts(arena.heap).live != 0 or count_now(&arena.graphs)
                or count_now(&arena.live_spans))
    lock_acquire(&arena.lock)
    used = is_used(arena)
    lock_release(&arena.lock)
    return used


cdef bint arena_is_idle(ArenaCore* arena) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef bint waits, idle
    if context_is_dead(arena.context) or not arena_is_open(arena):
        return True
    if is_in_use(arena):
        return False
    mode = context_relax(arena.context)
    # Quarantined blocks are freed after a wait for the device.
    waits = (arena.heap != NULL and heap_counts(arena.heap).held != 0 or apart_bytes(arena) != 0
             or (arena.backing.waits and arena_reserved(arena) != 0))
    idle = streams_are_done(arena) and (not waits or devices_are_quiet())
    context_restore(arena.context, mode)
    return idle


cdef int arena_close_wait(ArenaCore* arena) noexcept nogil:
    cdef bint interrupted = False
    if not context_is_dead(arena.context) and arena_has_memory(arena) and not is_in_use(arena):
        drain_streams(arena, &interrupted)
    return ARENA_INTERRUPTED if interrupted else ARENA_OK


cdef void release_memory(ArenaCore* arena, bint with_wait) noexcept nogil:
    # Cached blocks count as used, so they go to the table first. No release waits for the streams
    # that use a region.
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    caches_flush(arena)
    drain_streams(arena, NULL)
    free_all_pending(arena)
    release_regions(arena, with_wait)
    release_regions(arena, with_wait)       # a second try for those that the driver refused
    spans_sweep(arena)
    spans_sweep(arena)
    context_restore(arena.context, mode)


cdef void release_regions(ArenaCore* arena, bint with_wait) noexcept nogil:
    while release_one(arena, False, False) or release_one(arena, True, False):
        pass
    if with_wait:
        release_waiting(arena)


cdef int arena_check(ArenaCore* arena) noexcept nogil:
    cdef int broken
    caches_freeze(arena)
    lock_acquire(&arena.lock)
    broken = check_tables(arena, True)
    lock_release(&arena.lock)
    caches_thaw(arena)
    # A thread that is making memory has charged more.
    if broken == 0 and lock_try(&arena.grow_lock):
        broken = check_level(arena)
        lock_release(&arena.grow_lock)
    return broken


# ---- leases --------------------------------------------------------------------------------------

cdef Lease* arena_lease(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    cdef Lease* lease = lease_create(handle, 0, 0, stream_slot, arena, release_lease)
    # A lease may outlive the Arena object: its reference keeps the tables that its free needs.
    if lease != NULL:
        lease.owner_views = &arena.views
        arena_retain(arena)
    return lease


cdef void release_lease(Lease* lease) noexcept nogil:
    cdef ArenaCore* arena = <ArenaCore*>lease.owner
    if context_is_dead(arena.context):
        uses_free(lease.uses)
    elif lease.uses != NULL:
        arena_free_used(arena, lease.handle, lease.stream_slot, lease.uses)
    else:
        arena_free(arena, lease.handle, lease.stream_slot)
    arena_drop(arena)


cdef void arena_move_lease(ArenaCore* arena, Lease* lease, uint32_t stream_slot) noexcept nogil:
    cdef Bfc* table
    cdef uint32_t index
    lock_acquire(&arena.lock)
    lease.stream_slot = stream_slot
    table = table_of(arena, lease.handle)
    if bfc_resolve(table, lease.handle & ~<uint64_t>IN_SMALL, &index) == BFC_OK:
        table.chunks[index].stream_slot = stream_slot
    lock_release(&arena.lock)


# ---- graph pools ---------------------------------------------------------------------------------

cdef enum:
    NO_DESTRUCTOR_SYNC = 1      # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: the driver accepts no other
    MOVE_REFERENCE = 1          # CU_GRAPH_USER_OBJECT_MOVE: the reference becomes the graph's
    # Bytes, where its arena has regions. They double up to here only, and a larger block has one of
    # its own size: a graph's memory is not shared with other work.
    POOL_REGION = 33554432
    FIRST_REGION = 2097152


cdef ArenaCore* pool_create(ArenaCore* owner, ArenaCore* part_of, const Backing* given,
                            bint splits, bint captured) noexcept nogil:
    cdef ArenaSettings settings = owner.settings
    cdef Backing backing
    cdef ArenaCore* pool
    backing_init(&backing, owner.context)
    # No second backing of another kind of memory, or of a source, can be made; pools are not
    # nested.
    if given == NULL and owner.backing.reserve != backing.reserve or is_graph_pool(owner):
        return NULL
    if given != NULL:
        backing = given[0]
        backing.forget = NULL       # it stays the caller's until nothing can fail
    settings.max_mem = 0            # the parent's limit bounds both
    settings.initial_chunk = settings.initial_growth_chunk = FIRST_REGION
    if not splits:
        settings.extend = EXTEND_SAME_AS_REQUESTED
    # Streams of a capture may run at the same time at every launch, whatever has completed now.
    settings.reuse = REUSE_NEVER
    settings.ort_split = False
    settings.exact = False
    settings.paged = owner.settings.paged and captured and splits and given == NULL
    settings.move_budget = 1
    settings.passthrough = False
    settings.oom_wait = 0
    pool = arena_create(&settings, backing)
    if pool == NULL:
        return NULL
    if not splits:
        pool.table.split_rule = SPLIT_NEVER
    pool.is_bare = True
    if not arena_join_as(pool, owner):
        arena_drop(pool)
        return NULL
    if given != NULL:
        pool.backing.forget = given.forget
    pool_adopt(pool, owner, part_of)
    # Opened as an event source only when it is complete: from here on threads may read it.
    event_source_name(&pool.events, owner.events.memory, b"graph pool", owner.events.name)
    event_source_open(&pool.events, pool, OWNER_ARENA)
    return pool


cdef void pool_adopt(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil:
    # Each region of a pool that can sleep has a handle. The owner's lock keeps peers from being
    # added.
    cdef int i
    pool.settings.max_extend = min(pool.settings.max_extend, <uint64_t>POOL_REGION)
    lock_acquire(&owner.grow_lock)
    if owner.settings.paged and pool.backing.source == NULL:
        pool.access = owner.access
        if not pool.settings.paged:
            numa_init(&pool.backing, pool.context, THE_DEVICE)
            pool.backing.exportable = pages_are_exportable()
            pool.backing.access = &pool.access
    for i in range(SPACES):
        pool.spaces[i].keeps_views = True
    pool_join(pool, owner, part_of)
    lock_release(&owner.grow_lock)


cdef ArenaCore* pool_for_tag(ArenaCore* pool) noexcept nogil:
    cdef ArenaCore* owner = tag_now(root_of(pool))
    cdef ArenaCore* part
    if owner == NULL or owner == pool.sleeps_with or pool.sleeps_with == NULL:
        return pool
    part = part_next(pool, NULL)
    while part != NULL and part.sleeps_with != owner:
        part = part_next(pool, part)
    if part == NULL:
        part = pool_create(owner, pool, NULL, pool.table.split_rule != SPLIT_NEVER,
                           pool.settings.paged)
    # The pool refers to it. Two threads may have made one each: both serve.
    if part != NULL:
        arena_drop(part)
    return part


cdef void pool_begin(ArenaCore* pool) noexcept nogil:
    cdef ArenaCore* part = part_next(pool, NULL)
    complete_done_streams(pool)
    while part != NULL:
        complete_done_streams(part)
        part = part_next(pool, part)


cdef void pool_end(ArenaCore* pool) noexcept nogil:
    cdef ArenaCore* part = part_next(pool, NULL)
    give_up_views(pool)
    while part != NULL:
        give_up_views(part)
        part = part_next(pool, part)
    pool_begin(pool)


cdef CUresult pool_retain_with(ArenaCore* pool, CUgraph graph) noexcept nogil:
    cdef CUuserObject counted = NULL
    cdef CUresult code
    if pool.context.table.cuUserObjectCreate == NULL:
        return CUDA_ERROR_NOT_SUPPORTED
    code = context_enter(pool.context)
    if code != CUDA_SUCCESS:
        return code
    # Counted before the driver may call graph_ended, which it does on another thread.
    arena_retain(pool)
    count_add(&pool.graphs, 1)
    count_add(&pool.parent.graphs, 1)
    code = pool.context.table.cuUserObjectCreate(&counted, pool, graph_ended, 1, NO_DESTRUCTOR_SYNC)
    if code != CUDA_SUCCESS:
        graph_ended(pool)
    else:
        code = pool.context.table.cuGraphRetainUserObject(graph, counted, 1, MOVE_REFERENCE)
        # Releasing the last reference calls graph_ended.
        if code != CUDA_SUCCESS:
            pool.context.table.cuUserObjectRelease(counted, 1)
    context_leave(pool.context)
    return code


cdef void graph_ended(void* retained) noexcept nogil:
    # On a thread of the driver's, which must not call the driver: dropping only retires the pool.
    cdef ArenaCore* pool = <ArenaCore*>retained
    count_add(&pool.parent.graphs, -1)
    count_add(&pool.graphs, -1)
    arena_drop(pool)


# ---- a block at a given place --------------------------------------------------------------------

cdef int arena_allocate_range(ArenaCore* arena, uint64_t address, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, Block* block) noexcept nogil:
    cdef int status = BFC_OK
    cdef uint32_t index = NIL
    cdef Bfc* table = &arena.table
    cdef Space* space = &arena.spaces[LARGE_SPACE]
    cdef bint backed = True
    lock_acquire(&arena.lock)
    if arena.settings.paged:
        if space_reserves(&arena.spaces[SMALL_SPACE], address, size):
            table = &arena.small
            space = &arena.spaces[SMALL_SPACE]
        backed = (space_reserves(space, address, size)
                  and space_restore(space, address, address + size))
    if backed:
        index = bfc_allocate_range(table, address, size, requested, stream_slot, &status)
    if index != NIL:
        finish_allocate(arena, NULL, table, index, block)
    lock_release(&arena.lock)
    if index == NIL:
        return ARENA_NO_METADATA if status == BFC_NO_METADATA else ARENA_STALE
    if is_recorded(&arena.events):
        note_allocate(arena, requested, stream_slot, block)
    return ARENA_OK

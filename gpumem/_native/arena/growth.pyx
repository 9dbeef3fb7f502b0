"""Growth of an arena, by regions or by pages, and the wait for memory if it cannot grow."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._native.arena.bookkeeping cimport (
    arena_charge, arena_charge_pages, arena_charge_region, arena_reconcile, arena_refund_pages,
    finish_allocate, note_region, note_reserved, refuse_budget,
)
from gpumem._native.arena.release cimport (
    release_idle_beside, release_in_other_range, release_memory_of, release_overdraft,
    release_regions,
)
from gpumem._native.arena.streams cimport (
    is_worth_polling, mark_remainders_dirty, record_events_of_others, release_completed,
    set_cross_stream_search, wait_behind,
)
from gpumem._native.arena.family cimport (
    any_pool_next, arena_drop, pool_next, shares_limit, tag_next,
)
from gpumem._native.arena.thread_cache cimport (
    cache_find, cache_publish, caches_count_frees, caches_counts, caches_freeze, caches_thaw,
)
from gpumem._native.arena.types cimport (
    ALLOCATE_ALONE, ALLOCATE_INTERRUPTIBLE, ALLOCATE_PERSISTENT, ALLOCATE_SHAREABLE,
    ALLOCATE_TRANSPORT, apart_from, APART_SHAREABLE, APART_TRANSPORT, arena_admits,
    ARENA_BEYOND_DEVICE, arena_can_sleep, ARENA_DRIVER_REFUSED, arena_in_use, ARENA_INTERRUPTED,
    arena_is_open, ARENA_NO_METADATA, ARENA_OK, ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, arena_reserved,
    arena_reserved_now, ArenaCore, ArenaSpan, Block, driver_refused, EXTEND_SAME_AS_REQUESTED,
    family_held, family_level, family_limit, is_graph_pool, LARGE_SPACE, last_refusal, live_peak,
    move_clock, PERSISTENT_SPACE, REUSE_NEVER, REUSE_WAIT, root_of, SHARED_BLOCK, SMALL_BLOCK,
    SMALL_SPACE, SPACES, STREAM_NAMED, StreamSlot, table_for, with_share,
)
from gpumem._native.backing cimport (
    Backing, backing_release, backing_reserve, backing_set_access, Mapped, mapped_add,
    mapped_around,
)
from gpumem._native.bfc cimport (
    Bfc, bfc_add_region, bfc_allocate, bfc_allocate_at, bfc_allocate_from, bfc_allocate_region,
    bfc_free, bfc_lowest, bfc_note_swap, BFC_OK, NIL, QUANTUM, round_to_quantum, SLOT_RELEASED,
    SPLIT_EXACT,
)
from gpumem._native.budget cimport (
    await_refund, budget_ceiling, budget_has_node, budget_left, budget_room, BUDGET_UNLIMITED,
)
from gpumem._native.driver cimport (
    access_has, access_next, context_enter, context_leave, context_relax, context_restore,
    CU_MEM_ACCESS_FLAGS_PROT_NONE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS, CUmemAccessDesc, CUresult, CUstreamCaptureMode,
)
from gpumem._native.pages cimport (
    Action, ACTION_CREATE, ACTION_MOVE, ACTION_RELEASE, ActionKind, budget_earn, budget_slack,
    budget_spend, bytes_of, Demand, GRANULE, MappedPage, MAX_PAGE_GRANULES, Piece, Plan, plan_free,
    PLAN_NO_MEMORY, PLAN_NO_PLACE, plan_note, PLAN_OK, PlanResult, Range, range_reserve,
    round_to_granule, Space, space_add_range, space_allocate_lower, space_execute, space_finish,
    space_page_around, space_plan, space_set_access, space_undo, span_set_access,
)
from gpumem._support.atomics cimport load32, load64, locked_add64, peak_try, publish32, sum_add
from gpumem._support.clock cimport clock_ns, sleep_ns
from gpumem._support.events cimport REC_RESERVE
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.process cimport process_interrupted


cdef enum:
    BACK_OFF_FLOOR = 8192       # bytes; a smaller region is not worth polling for


cdef int grow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, bint own_region,
              uint32_t flags, Block* block) noexcept nogil:
    cdef int status
    if own_region:
        status = add_own_region(arena, nbytes, stream_slot, flags, block)
    elif arena.settings.paged:
        status = grow_pages(arena, nbytes, stream_slot, block)
    else:
        status = grow_region(arena, nbytes, stream_slot, block)
    arena_reconcile(arena)
    return status


cdef int grow_region(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                     Block* block) noexcept nogil:
    # Reserves a region without the arena lock, then adds it and allocates the block from it in one
    # step, so that no other thread can allocate it in between.
    cdef uint64_t size = whole_granules(&arena.backing, nbytes)
    cdef uint64_t running, wanted, address
    cdef Bfc* table = table_for(arena, nbytes)
    cdef bint forced = False
    cdef uint32_t region, index
    cdef int status = BFC_OK
    running = next_region_size(arena, size, &forced)
    wanted = running
    # Before the driver is called: a refusal must not cost a driver call.
    status = arena_charge_region(arena, size, &wanted)
    if status != ARENA_OK:
        return status
    if not reserve_with_back_off(arena, &wanted, size, &address):
        return ARENA_DRIVER_REFUSED
    lock_acquire(&arena.lock)
    if bfc_add_region(table, address, wanted, False, &region) != BFC_OK:
        lock_release(&arena.lock)
        backing_release(&arena.backing, address, wanted)
        return ARENA_NO_METADATA
    # Only now: a growth that failed steers neither the statistics nor the size of the next one.
    locked_add64(&arena.stats.num_extensions, 1)
    note_reserved(arena)
    note_region(arena, REC_RESERVE, address, wanted)
    advance_growth(arena, running, forced)
    if table.split_rule == SPLIT_EXACT:
        index = bfc_allocate_region(table, region, nbytes, stream_slot)
    else:
        index = bfc_allocate_from(table, round_to_quantum(nbytes), nbytes, SLOT_RELEASED, 0,
                                  stream_slot, &status)
    if index != NIL:
        finish_allocate(arena, cache_find(arena), table, index, block)
    lock_release(&arena.lock)
    return ARENA_OK if index != NIL else ARENA_NO_METADATA


cdef uint64_t next_region_size(const ArenaCore* arena, uint64_t size,
                               bint* forced) noexcept nogil:
    # Doubling starts at initial_chunk. A request larger than the running size doubles it as often
    # as needed, above the cap if it must; only a growth that needed none lets it double after.
    # Changes nothing: the driver may refuse, and a failure must not steer later growth.
    cdef uint64_t running = arena.next_region
    if has_size_of_block(arena, size):
        return size
    if arena.settings.exact and size >= arena.settings.initial_chunk:
        running = arena.settings.max_extend     # of a huge page, which is made faster than a part
    while size > running:
        forced[0] = True
        running = size if running > (<uint64_t>1 << 62) else running * 2
    return running


cdef inline bint has_size_of_block(const ArenaCore* arena, uint64_t size) noexcept nogil:
    # The remainder of a graph pool's region after a large block would serve no other work.
    return (arena.settings.extend == EXTEND_SAME_AS_REQUESTED
            or arena.settings.exact and size > SHARED_BLOCK
            or is_graph_pool(arena) and size > arena.settings.max_extend)


cdef void advance_growth(ArenaCore* arena, uint64_t running, bint forced) noexcept nogil:
    if has_size_of_block(arena, running):
        return
    if forced:
        arena.next_region = running
    elif running < arena.settings.max_extend // 2:
        arena.next_region = running * 2
    else:
        arena.next_region = arena.settings.max_extend


cdef bint reserve_with_back_off(ArenaCore* arena, uint64_t* wanted, uint64_t size,
                                uint64_t* address) noexcept nogil:
    # After a refusal a region of nine tenths is tried, until that is less than needed.
    cdef uint64_t less
    cdef CUresult code
    while True:
        code = backing_reserve(&arena.backing, wanted[0], address)
        if code == CUDA_SUCCESS:
            return True
        driver_refused(arena, code, NULL)
        if code != CUDA_ERROR_OUT_OF_MEMORY or wanted[0] == size:
            return False
        less = whole_granules(&arena.backing, wanted[0] // 10 * 9)
        wanted[0] = less if less < wanted[0] else wanted[0] - arena.backing.granule
        if wanted[0] < size or wanted[0] < BACK_OFF_FLOOR:
            wanted[0] = size


cdef inline uint64_t whole_granules(const Backing* backing, uint64_t nbytes) noexcept nogil:
    # Bytes of the smallest region that holds `nbytes`.
    return round_to_quantum(nbytes + backing.granule - QUANTUM) & ~(backing.granule - 1)


cdef bint shrink_may_help(const ArenaCore* arena, uint64_t nbytes,
                          int status) noexcept nogil:
    # Not of a graph pool: graphs write its free memory whenever they are launched. And not for a
    # block that is over the limit by itself: it must not cost other blocks their regions.
    if is_graph_pool(arena):
        return False
    if status == ARENA_OVER_LIMIT:
        return round_to_quantum(nbytes) <= family_limit(arena)
    if status == ARENA_OVER_BUDGET:
        return round_to_quantum(nbytes) <= budget_ceiling(arena.level)
    return status == ARENA_DRIVER_REFUSED


cdef bint memory_is_out(const ArenaCore* arena, uint64_t nbytes, int status) noexcept nogil:
    if status == ARENA_DRIVER_REFUSED and last_refusal(arena) != CUDA_ERROR_OUT_OF_MEMORY:
        return False
    return shrink_may_help(arena, nbytes, status)


cdef bint refund_may_help(ArenaCore* arena, int status, uint64_t* until) noexcept nogil:
    if status == ARENA_DRIVER_REFUSED:
        status = (ARENA_BEYOND_DEVICE if last_refusal(arena) == CUDA_ERROR_OUT_OF_MEMORY
                  else ARENA_OK)
    return (status == ARENA_BEYOND_DEVICE and await_refund != NULL
            and await_refund(arena.level, until))


cdef int add_own_region(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                        Block* block) noexcept nogil:
    # Makes a region of exactly this block, in whole granules of the backing.
    cdef Backing* backing = backing_for(arena, flags)
    cdef uint64_t size = whole_granules(backing, nbytes)
    cdef uint64_t address
    cdef uint32_t region
    cdef int status = arena_admits(arena)
    if status == ARENA_OK:
        status = reserve_own(arena, backing, size, &address)
    if status != ARENA_OK:
        return status
    lock_acquire(&arena.lock)
    if bfc_add_region(&arena.table, address, size, True, &region) != BFC_OK:
        lock_release(&arena.lock)
        release_memory_of(arena, address, size)
        return ARENA_NO_METADATA
    note_reserved(arena)
    note_region(arena, REC_RESERVE, address, size)
    finish_allocate(arena, NULL, &arena.table,
                    bfc_allocate_region(&arena.table, region, nbytes, stream_slot), block)
    if flags & ALLOCATE_PERSISTENT:
        locked_add64(&arena.stats.num_reserves, 1)
    lock_release(&arena.lock)
    return ARENA_OK


cdef Backing* backing_for(ArenaCore* arena, uint32_t flags) noexcept nogil:
    if flags & ALLOCATE_SHAREABLE:
        return &arena.apart[APART_SHAREABLE]
    # None was made where the arena's own regions do.
    if flags & ALLOCATE_TRANSPORT and arena.apart[APART_TRANSPORT].reserve != NULL:
        return &arena.apart[APART_TRANSPORT]
    return &arena.backing


cdef CUresult list_for_transport(ArenaCore* arena, uint64_t address) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef uint64_t begin = 0
    cdef uint64_t size = 0
    cdef uint32_t i
    lock_acquire(&arena.grow_lock)
    lock_acquire(&arena.lock)
    for i in range(arena.table.region_count):
        if arena.table.regions[i].address <= address < (arena.table.regions[i].address
                                                        + arena.table.regions[i].size):
            begin = arena.table.regions[i].address
            size = arena.table.regions[i].size
    lock_release(&arena.lock)
    if size and apart_from(arena, begin) == NULL and mapped_add(
            &arena.apart[APART_TRANSPORT], begin, size, 0) == NULL:
        code = CUDA_ERROR_OUT_OF_MEMORY
    lock_release(&arena.grow_lock)
    return code


cdef int reserve_own(ArenaCore* arena, Backing* backing, uint64_t size,
                     uint64_t* address) noexcept nogil:
    cdef CUresult code
    cdef int status
    if arena.settings.paged and backing == &arena.backing:
        return persistent_reserve(arena, size, address)
    status = arena_charge(arena, size)
    if status != ARENA_OK:
        return status
    code = backing_reserve(backing, size, address)
    if code == CUDA_SUCCESS:
        return ARENA_OK
    # The name of the call is stored if the backing is not the arena's own.
    return driver_refused(arena, code, backing.call if backing != &arena.backing
                          else <const char*>NULL)


# ---- exact regions -------------------------------------------------------------------------------

cdef bint bound_idle(ArenaCore* arena, uint64_t nbytes, bint quiet) noexcept nogil:
    cdef Bfc* table = &arena.table
    cdef uint64_t spare, wasted, limit
    lock_acquire(&arena.lock)
    limit = peak_with(arena, nbytes)
    spare = with_share(arena, limit) - limit if quiet else limit
    limit += spare
    # The caches were flushed, so that it is nearly exact.
    wasted = table.in_use - min(table.in_use, table.requested_in_use)
    table.max_dead = spare - min(spare, wasted)
    limit -= min(limit, arena_reserved(arena))
    lock_release(&arena.lock)
    return whole_granules(&arena.backing, nbytes) > limit


cdef void release_surplus(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef uint64_t size = whole_granules(&arena.backing, nbytes)
    cdef uint64_t reserved, limit
    lock_acquire(&arena.lock)
    reserved = arena_reserved(arena)
    limit = with_share(arena, peak_with(arena, nbytes))
    lock_release(&arena.lock)
    limit = min(limit, reserved + min(budget_left(family_level(arena)), budget_room(arena.level)))
    if reserved + size > limit:
        release_regions(arena, reserved + size - limit)


cdef inline uint64_t peak_with(const ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    # Caller holds `lock`. The live peak, once a block of this size is in use.
    return max(arena_in_use(arena) + round_to_quantum(nbytes), live_peak(arena))


# ---- peers ---------------------------------------------------------------------------------------

cdef CUresult arena_add_peer(ArenaCore* arena, int device) noexcept nogil:
    # Memory that is mapped later gets the list in the call that sets the access of its own device.
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef CUresult code = CUDA_SUCCESS
    cdef ArenaCore* pool
    lock_acquire(&arena.grow_lock)
    # Graph pools first: an arena that has the peer already is skipped.
    pool = pool_next(arena, NULL)
    while pool != NULL and code == CUDA_SUCCESS:
        code = arena_add_peer(pool, device) if arena_can_sleep(pool) else CUDA_SUCCESS
        pool = pool_next(arena, pool)
    if pool != NULL:
        arena_drop(pool)
    if code == CUDA_SUCCESS and not access_has(&arena.access, device):
        code = add_peer(arena, access_next(&arena.access, device))
        if code == CUDA_SUCCESS:
            publish32(&arena.access.count, arena.access.count + 1)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return code


cdef CUresult add_peer(ArenaCore* arena, CUmemAccessDesc* place) noexcept nogil:
    cdef CUresult code
    if place == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    code = context_enter(arena.context)
    if code != CUDA_SUCCESS:
        return code
    code = set_access(arena, place)
    if code != CUDA_SUCCESS:
        # Access that was set until now is removed. If that is refused, the device keeps access to
        # pages that it has no address of, until they move.
        place.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE
        set_access(arena, place)
    context_leave(arena.context)
    return code


cdef CUresult set_access(ArenaCore* arena, const CUmemAccessDesc* place) noexcept nogil:
    cdef CUresult code = backing_set_access(&arena.backing, place)
    cdef const ArenaSpan* span = arena.spans
    cdef int i
    if code == CUDA_SUCCESS:
        code = backing_set_access(&arena.apart[APART_SHAREABLE], place)
    for i in range(SPACES):
        if code == CUDA_SUCCESS:
            code = space_set_access(&arena.spaces[i], place)
    while span != NULL and code == CUDA_SUCCESS:
        code = span_set_access(&span.pages, place)
        span = span.next
    return code


cdef bint arena_page_around(ArenaCore* arena, uint64_t address, MappedPage* found) noexcept nogil:
    cdef bint is_mapped
    cdef int i
    lock_acquire(&arena.grow_lock)
    is_mapped = region_around(&arena.backing, address, found)
    for i in range(SPACES):
        if not is_mapped:
            is_mapped = space_page_around(&arena.spaces[i], address, found)
    lock_release(&arena.grow_lock)
    return is_mapped


cdef bint region_around(const Backing* backing, uint64_t address, MappedPage* found) noexcept nogil:
    # A graph pool's region is one physical handle. It has no memory while it sleeps.
    cdef const Mapped* region = mapped_around(backing, address) if backing.has_handles else NULL
    if region == NULL or region.memory == 0:
        return False
    found.begin = region.address
    found.nbytes = region.nbytes
    found.memory = region.memory
    return True


# ---- A paged arena: grows, keeps persistent regions; see _native/pages/types.pxd -----------------

cdef enum:
    SMALL_RANGE_FROM = 67108864     # bytes in use from which small blocks have their own range
    # Free bytes from which remainders are marked dirty; each costs an event.
    IDLE_FROM = 33554432
    ASK_FREE = 268435456        # bytes; for blocks from here on the device's free memory is read


# ---- growing -------------------------------------------------------------------------------------

cdef int grow_pages(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                    Block* block) noexcept nogil:
    cdef Demand demand
    cdef uint32_t index
    cdef Bfc* table
    cdef int status
    release_beyond_share(arena, round_to_quantum(nbytes))
    open_small_range(arena, nbytes)
    table = table_for(arena, nbytes)
    demand_of(arena, nbytes, stream_slot, &demand)
    status = device_admits(arena, demand.size)
    if status == ARENA_OK:
        status = build(arena, space_for(arena, table), &demand, &index)
    if status != ARENA_OK:
        return status
    lock_acquire(&arena.lock)
    cache_publish(arena, cache_find(arena))
    finish_allocate(arena, cache_find(arena), table, index, block)
    lock_release(&arena.lock)
    raise_family_peak(arena)
    release_overdraft(arena)
    return ARENA_OK


cdef void release_before_growth(ArenaCore* arena, uint64_t nbytes,
                                uint32_t stream_slot) noexcept nogil:
    if arena.settings.reuse == REUSE_NEVER:
        return
    if arena.settings.paged and mostly_idle(arena, round_to_quantum(nbytes)):
        mark_remainders_dirty(arena, stream_slot)
    # The requesting stream is polled, too: views left by earlier moves can be unmapped once their
    # work is known to be done.
    release_completed(arena, SLOT_RELEASED if arena.settings.paged else stream_slot)


cdef bint mostly_idle(ArenaCore* arena, uint64_t size) noexcept nogil:
    # More than half of the memory, as where many streams have a small block each.
    cdef uint64_t reserved, needed
    lock_acquire(&arena.lock)
    reserved = arena_reserved(arena)
    needed = arena_in_use(arena) + size
    lock_release(&arena.lock)
    return reserved > 2 * needed and reserved - needed >= IDLE_FROM


cdef inline void open_small_range(ArenaCore* arena, uint64_t size) noexcept nogil:
    # An arena of a few megabytes has one range only: a page more for its small blocks would show.
    # Caches name blocks by index in one table: they are empty when it changes.
    cdef uint64_t in_use
    if arena.small_below:
        return
    lock_acquire(&arena.lock)
    in_use = arena_in_use(arena)
    lock_release(&arena.lock)
    if in_use + size < SMALL_RANGE_FROM:
        return
    caches_freeze(arena)
    lock_acquire(&arena.lock)
    arena.small_below = SMALL_BLOCK
    lock_release(&arena.lock)
    caches_thaw(arena)


cdef int prepare_pages(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef Demand demand
    cdef uint32_t index
    cdef int status
    demand_of(arena, nbytes, SLOT_RELEASED, &demand)
    status = device_admits(arena, demand.size)
    if status == ARENA_OK:
        status = build(arena, &arena.spaces[LARGE_SPACE], &demand, &index)
    if status == ARENA_OK:
        lock_acquire(&arena.lock)
        bfc_free(&arena.table, index, SLOT_RELEASED, 0)
        lock_release(&arena.lock)
    arena_reconcile(arena)
    return status


cdef void demand_of(const ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                    Demand* demand) noexcept nogil:
    demand.size = round_to_quantum(nbytes)
    demand.claim = demand.size
    demand.requested = nbytes
    demand.stream_slot = stream_slot
    demand.hard_limit = BUDGET_UNLIMITED
    demand.by_budget = False
    demand.unfinished = arena.settings.reuse == REUSE_WAIT and stream_slot != SLOT_RELEASED
    demand.gapped = demand.anew = False


cdef inline Space* space_for(ArenaCore* arena, const Bfc* table) noexcept nogil:
    return &arena.spaces[SMALL_SPACE if table == &arena.small else LARGE_SPACE]


cdef uint32_t allocate_lower(ArenaCore* arena, Bfc* table, uint64_t nbytes, uint32_t stream_slot,
                             int* status) noexcept nogil:
    # Swaps change the tables alone, of pages that no plan under way has: the arena lock is enough.
    cdef Demand demand
    cdef uint32_t found, index
    demand_of(arena, nbytes, stream_slot, &demand)
    found = bfc_lowest(table, demand.size, stream_slot)
    index = space_allocate_lower(space_for(arena, table), &demand, table.chunks[found].address)
    bfc_note_swap(table, demand.size, index != NIL)
    if index == NIL:
        index = bfc_allocate_at(table, found, demand.size, nbytes, stream_slot, status)
    return index


cdef int device_admits(ArenaCore* arena, uint64_t size) noexcept nogil:
    # The device's free memory and the arena's idle memory together: a plan for more would make and
    # release every page before it failed.
    cdef size_t free_bytes = 0
    cdef size_t total = 0
    cdef uint64_t idle
    cdef int status = ARENA_OK
    if size < ASK_FREE or context_enter(arena.context) != CUDA_SUCCESS:
        return ARENA_OK
    if arena.context.table.cuMemGetInfo(&free_bytes, &total) != CUDA_SUCCESS:
        free_bytes = <size_t>1 << 62
    context_leave(arena.context)
    sum_add(&arena.backing.calls, 1)
    lock_acquire(&arena.lock)
    idle = arena_reserved(arena) - arena_in_use(arena)
    lock_release(&arena.lock)
    if size <= free_bytes + idle:
        return ARENA_OK
    # Other processes of a node may have the memory, and release it once the budget has refused.
    if budget_has_node(arena.level):
        status = arena_charge(arena, size - min(size, idle))
        arena_reconcile(arena)
    return status if status != ARENA_OK else ARENA_BEYOND_DEVICE


cdef int build(ArenaCore* arena, Space* space, Demand* demand, uint32_t* index) noexcept nogil:
    # A used chunk of the demand's size. Where the driver has no memory left, once more from idle
    # pages alone.
    cdef int status = build_within(arena, space, demand, index)
    if status == ARENA_DRIVER_REFUSED and last_refusal(arena) == CUDA_ERROR_OUT_OF_MEMORY:
        demand.hard_limit = arena_reserved(arena)
        demand.by_budget = False
        status = build_within(arena, space, demand, index)
        if status == ARENA_OVER_LIMIT:
            status = ARENA_DRIVER_REFUSED
    return status


cdef int build_within(ArenaCore* arena, Space* space, Demand* demand,
                      uint32_t* index) noexcept nogil:
    # Idle pages may all be larger than what is missing. Then a place that is larger by some
    # granules takes them; what the block leaves of it is free right after. Pages in the place may
    # leave gaps between them that are smaller: then it is built anew, where no page is.
    cdef int status = ARENA_OVER_LIMIT
    cdef int wider
    for wider in range(2 * MAX_PAGE_GRANULES):
        demand.claim = demand.size + <uint64_t>(wider % MAX_PAGE_GRANULES) * GRANULE
        demand.anew = wider >= MAX_PAGE_GRANULES
        if demand.anew and not demand.gapped:
            break
        status = build_claim(arena, space, demand, index)
        if (status != ARENA_OVER_LIMIT and status != ARENA_OVER_BUDGET) or not space.large:
            break
    return status


cdef int build_claim(ArenaCore* arena, Space* space, Demand* demand,
                     uint32_t* index) noexcept nogil:
    cdef Plan plan
    cdef CUresult code
    cdef uint64_t created, released
    cdef bint in_order = True
    cdef int status = plan_in_ranges(arena, space, demand, &plan)
    if status != ARENA_OK:
        return status
    if plan.beyond_share and not plan.spares:
        release_in_other_range(arena, space, &plan, demand.live_peak)
    created = bytes_planned(space, &plan, ACTION_CREATE)
    released = bytes_planned(space, &plan, ACTION_RELEASE)
    status = arena_charge_pages(arena, created, released)
    if status != ARENA_OK:
        undo_plan(arena, space, &plan)
        # Another tag was faster: a new plan moves idle pages where this one would make more.
        return build_claim(arena, space, demand, index) if status == ARENA_OVER_LIMIT else status
    code = space_execute(space, &plan)
    arena_refund_pages(arena, created, released)
    lock_acquire(&arena.lock)
    budget_spend(&arena.move_budget, plan.move_ns)
    if code == CUDA_SUCCESS:
        budget_earn(&arena.move_budget, plan.create_ns)
    plan_note(space, &plan)
    if code == CUDA_SUCCESS:
        # Last, because nothing undoes a wait.
        in_order = not demand.unfinished or wait_behind_plan(arena, &plan, demand.stream_slot)
    if code == CUDA_SUCCESS and in_order:
        if space_finish(space, &plan, demand, arena.streams[demand.stream_slot].epoch):
            arena.streams[demand.stream_slot].has_remainder = True
        note_reserved(arena)
        # Memory that is prepared, for no stream yet, stays.
        if plan.spares and demand.stream_slot != SLOT_RELEASED:
            arena.overdraft += plan.beyond_share
        index[0] = plan.chunk
    else:
        if code != CUDA_SUCCESS:
            driver_refused(arena, code, plan.refused)
        space_undo(space, &plan)
    lock_release(&arena.lock)
    plan_free(&plan)
    if not in_order:
        # The driver refused a wait: the next plan uses no unfinished memory of other streams.
        arena_reconcile(arena)
        demand.unfinished = False
        return build_claim(arena, space, demand, index)
    return ARENA_OK if code == CUDA_SUCCESS else ARENA_DRIVER_REFUSED


cdef void undo_plan(ArenaCore* arena, Space* space, Plan* plan) noexcept nogil:
    lock_acquire(&arena.lock)
    space_undo(space, plan)
    lock_release(&arena.lock)
    plan_free(plan)


cdef bint wait_behind_plan(ArenaCore* arena, const Plan* plan, uint32_t requesting) noexcept nogil:
    # Caller holds the arena lock, which is released for the calls. The requesting stream waits once
    # for each stream that has work which may still use the block's memory, in its place or in the
    # pages that came there.
    cdef uint32_t slots = arena.table.stream_slot_count
    cdef uint64_t* until = <uint64_t*>calloc(slots, sizeof(uint64_t))
    cdef const Action* action
    cdef const Piece* piece
    cdef uint32_t i
    cdef bint in_order = until != NULL
    if not in_order:
        return False
    for i in range(plan.piece_count):
        piece = &plan.pieces[i]
        until[piece.stream_slot] = max(until[piece.stream_slot], piece.epoch)
    for i in range(plan.count):
        action = &plan.actions[i]
        if action.kind == ACTION_MOVE:
            until[action.stream_slot] = max(until[action.stream_slot], action.epoch)
    for i in range(1, slots):
        if until[i] and in_order:
            in_order = wait_behind(arena, i, until[i], requesting)
    free(until)
    return in_order


cdef uint64_t bytes_planned(const Space* space, const Plan* plan, ActionKind kind) noexcept nogil:
    cdef uint64_t nbytes = 0
    cdef uint32_t i
    for i in range(plan.count):
        if plan.actions[i].kind == kind:
            nbytes += bytes_of(&space.page[plan.actions[i].page])
    return nbytes


cdef int plan_in_ranges(ArenaCore* arena, Space* space, Demand* demand,
                        Plan* plan) noexcept nogil:
    # Plans in the ranges that exist; if none has a place, in one more.
    cdef PlanResult result = plan_place(arena, space, demand, plan)
    cdef int status
    if result == PLAN_NO_PLACE and arena_is_open(arena):
        status = add_range(arena, space, demand.claim)
        if status != ARENA_OK:
            return status
        result = plan_place(arena, space, demand, plan)
    if result == PLAN_OK:
        return ARENA_OK
    if not arena_is_open(arena):
        return arena_admits(arena)
    if result != PLAN_NO_MEMORY:
        return ARENA_NO_METADATA
    if not demand.by_budget:
        return ARENA_OVER_LIMIT
    return refuse_budget(arena, round_to_granule(demand.size))


cdef PlanResult plan_place(ArenaCore* arena, Space* space, Demand* demand,
                           Plan* plan) noexcept nogil:
    cdef PlanResult result = PLAN_NO_PLACE
    plan.actions = NULL
    lock_acquire(&arena.lock)
    if arena_is_open(arena):
        if demand.unfinished:
            record_events_of_others(arena, demand.stream_slot)
            # From here on the lock is not released until the plan is made.
            set_cross_stream_search(arena, demand.stream_slot, True)
        bound_by_room(arena, demand)
        set_limits(arena, space, demand)
        result = space_plan(space, demand, plan)
        set_cross_stream_search(arena, demand.stream_slot, False)
    if result == PLAN_OK and plan.over_limit:
        demand.gapped = True
        space_undo(space, plan)
        result = PLAN_NO_MEMORY
    lock_release(&arena.lock)
    if result != PLAN_OK:
        plan_free(plan)
    return result


cdef void bound_by_room(const ArenaCore* arena, Demand* demand) noexcept nogil:
    # So that idle pages move instead of new ones being refused, by max_mem or by a budget.
    cdef uint64_t reserved = arena_reserved(arena)
    cdef uint64_t within_limit = reserved + budget_left(family_level(arena))
    cdef uint64_t within_all = reserved + budget_room(arena.level)
    if within_limit < demand.hard_limit:
        demand.hard_limit = within_limit
        demand.by_budget = False
    if within_all < demand.hard_limit:
        demand.hard_limit = within_all
        demand.by_budget = True


cdef void set_limits(ArenaCore* arena, const Space* space, Demand* demand) noexcept nogil:
    cdef double slack
    demand.live_peak = max(arena_in_use(arena) + demand.size, live_peak(arena))
    demand.reserved = arena_reserved(arena)
    demand.spare_limit = 0
    if space == &arena.spaces[PERSISTENT_SPACE]:
        demand.share_limit = demand.hard_limit      # nothing in it is idle for long
        return
    demand.share_limit = min(demand.hard_limit, with_share(arena, demand.live_peak))
    # The clock is read only where something might move.
    if demand.reserved + demand.claim > demand.share_limit:
        slack = budget_slack(&arena.move_budget, move_clock(arena), demand.live_peak)
        demand.spare_limit = demand.hard_limit
        if slack < <double>(demand.hard_limit - demand.share_limit):
            demand.spare_limit = demand.share_limit + <uint64_t>slack


cdef int add_range(ArenaCore* arena, Space* space, uint64_t size) noexcept nogil:
    cdef Range fresh
    cdef bint added
    cdef CUresult code = range_reserve(space, size, &fresh)
    sum_add(&arena.backing.calls, 1)
    if code != CUDA_SUCCESS:
        return driver_refused(arena, code, "cuMemAddressReserve")
    lock_acquire(&arena.lock)
    added = space_add_range(space, &fresh)
    lock_release(&arena.lock)
    if not added:
        arena.context.table.cuMemAddressFree(fresh.base, fresh.bytes + GRANULE)
    return ARENA_OK if added else ARENA_NO_METADATA


# ---- Out of memory: the host waits ---------------------------------------------------------------

cdef enum:
    SIGNALS_EVERY = 50000000    # ns: a check takes the interpreter lock


cdef int wait_for_streams(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                          uint64_t* until) noexcept nogil:
    cdef uint32_t requesting = slot_to_skip(arena, nbytes, stream_slot, flags)
    cdef uint64_t before = load64(&arena.completions)
    cdef uint64_t frees = caches_count_frees(arena)
    cdef uint64_t next_pause = FIRST_PAUSE
    cdef uint64_t now = clock_ns()
    cdef bint in_time = until[0] == 0 or now < until[0]
    if until[0] == 0:
        until[0] = now + arena.settings.oom_wait
        mark_remainders_dirty(arena, requesting)
    while True:
        release_completed(arena, requesting)
        if load64(&arena.completions) != before:
            return ARENA_OK
        # Retry if other threads freed blocks, but only before the deadline: otherwise steady frees
        # would extend the wait without bound.
        if in_time and caches_count_frees(arena) != frees:
            return ARENA_OK
        # Out of time: these events are not waited for again until they have completed.
        if now >= until[0]:
            mark_events_timed_out(arena)
            return ARENA_OVER_LIMIT
        if not is_worth_waiting(arena, requesting):
            # A reset of a stream since the poll above leaves nothing to wait for.
            return ARENA_OK if load64(&arena.completions) != before else ARENA_OVER_LIMIT
        if pause(next_pause if next_pause < until[0] - now else until[0] - now, flags):
            return ARENA_INTERRUPTED
        next_pause = next_pause * 2 if next_pause < LONGEST_PAUSE else LONGEST_PAUSE
        now = clock_ns()


cdef uint32_t slot_to_skip(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                           uint32_t flags) noexcept nogil:
    # Memory that a stream has freed is its own again at once, in its order. But memory that lies
    # where the block cannot be has to be released first, once its work is done: all of it for a
    # block with a region of its own; a page or more of the other range of a paged arena.
    cdef const Bfc* other = &arena.small
    cdef bint lies_elsewhere
    if table_for(arena, nbytes) == other:
        other = &arena.table
    lock_acquire(&arena.lock)
    lies_elsewhere = other.reserved - other.in_use >= GRANULE
    lock_release(&arena.lock)
    return SLOT_RELEASED if flags & ALLOCATE_ALONE or lies_elsewhere else stream_slot


cdef bint pause(uint64_t nanoseconds, uint32_t flags) noexcept nogil:
    # Most signals cut the pause short; one that comes between two pauses is seen by the clock.
    cdef uint64_t before = clock_ns() // SIGNALS_EVERY
    return ((not sleep_ns(nanoseconds) or clock_ns() // SIGNALS_EVERY != before)
            and flags & ALLOCATE_INTERRUPTIBLE and process_interrupted())


cdef bint is_worth_waiting(ArenaCore* arena, uint32_t requesting) noexcept nogil:
    # Returns whether unfinished work holds memory that the requesting stream may use once it is
    # done.
    cdef uint32_t stream_slot
    cdef bint hope = False
    cdef const StreamSlot* stream
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        stream = &arena.streams[stream_slot]
        if stream.state == STREAM_NAMED and is_worth_polling(arena, stream_slot, requesting):
            if stream.event_epoch:
                hope = hope or stream.event_epoch != stream.timed_out_epoch
            # A handle that names no stream never gets an event.
            elif stream.refusal != CUDA_ERROR_INVALID_HANDLE:
                hope = hope or stream.in_driver or load32(&stream.dirty)
    lock_release(&arena.lock)
    return hope


cdef void mark_events_timed_out(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        arena.streams[stream_slot].timed_out_epoch = arena.streams[stream_slot].event_epoch
    lock_release(&arena.lock)


# ---- an arena and its tags -----------------------------------------------------------------------

cdef void release_beyond_share(ArenaCore* arena, uint64_t size) noexcept nogil:
    # Pages of other tags, and those beside a graph pool, cannot move here: where all together would
    # hold more than their share above the live peak, those that are idle are released first.
    cdef ArenaCore* root = <ArenaCore*>root_of(arena)
    cdef uint64_t live, reserved, peak
    if not shares_limit(arena):
        return
    live = family_in_use(arena) + size
    reserved = family_held(arena)
    peak = max(max(load64(&root.family_peak), live_peak(root)), live)
    if reserved + size > with_share(arena, peak):
        release_idle_beside(arena)


cdef void raise_family_peak(ArenaCore* arena) noexcept nogil:
    # Once there is memory for the block: what is refused was never in use.
    cdef ArenaCore* root = <ArenaCore*>root_of(arena)
    cdef uint64_t peak = load64(&root.family_peak)
    cdef uint64_t live
    if not shares_limit(arena):
        return
    live = family_in_use(arena)
    while live > peak and not peak_try(&root.family_peak, &peak, live):
        pass


cdef uint64_t family_in_use(ArenaCore* arena) noexcept nogil:
    # All memory of a graph pool counts as in use: its graphs use it.
    cdef uint64_t total = 0
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        total += in_use_without_caches(each) + load64(&each.spanned)
        each = tag_next(arena, each)
    each = any_pool_next(arena, NULL)
    while each != NULL:
        total += arena_reserved_now(each)
        each = any_pool_next(arena, each)
    return total


cdef uint64_t in_use_without_caches(const ArenaCore* arena) noexcept nogil:
    # Bytes that caches have not published yet are subtracted, too.
    cdef uint64_t used = load64(&arena.table.in_use) + load64(&arena.small.in_use)
    return used - min(used, caches_counts(arena).nbytes)


# ---- persistent blocks ---------------------------------------------------------------------------

cdef int persistent_reserve(ArenaCore* arena, uint64_t size, uint64_t* address) noexcept nogil:
    # Small persistent blocks share pages, which a table of their own divides.
    cdef Demand demand
    cdef uint32_t index
    cdef int status = BFC_OK
    cdef Bfc* table = &arena.persistent
    lock_acquire(&arena.lock)
    index = bfc_allocate(table, size, size, SLOT_RELEASED, &status)
    lock_release(&arena.lock)
    status = ARENA_OK if status == BFC_OK else ARENA_NO_METADATA
    if index == NIL and status == ARENA_OK:
        demand_of(arena, size, SLOT_RELEASED, &demand)
        status = device_admits(arena, size)
        if status == ARENA_OK:
            status = build_claim(arena, &arena.spaces[PERSISTENT_SPACE], &demand, &index)
    if status == ARENA_OK:
        address[0] = table.chunks[index].address
    return status

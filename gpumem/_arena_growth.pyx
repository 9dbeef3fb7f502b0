"""More memory for an arena, and less: regions and pages, with the grow lock held."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from gpumem._arena_books cimport hand_out
from gpumem._arena_cache cimport cache_find, cache_publish
from gpumem._arena_streams cimport forget_waits, settle_streams, take_behind, wait_for_others
from gpumem._arena_types cimport (
    ARENA_CLOSED,
    ARENA_DRIVER_REFUSED,
    arena_in_use,
    ARENA_NO_METADATA,
    ARENA_OK,
    ARENA_OVER_LIMIT,
    arena_reserved,
    ArenaCore,
    Block,
    EXTEND_SAME_AS_REQUESTED,
    lock_acquire,
    lock_release,
    REUSE_WAIT,
    table_for,
)
from gpumem._bfc cimport (
    Bfc,
    bfc_add_region,
    BFC_NO_METADATA,
    BFC_OK,
    bfc_region_is_idle,
    bfc_remove_region,
    bfc_take,
    bfc_take_from,
    bfc_take_persistent,
    LANE_RELEASED,
    load32,
    NIL,
    QUANTUM,
    round_to_quantum,
    store32,
)
from gpumem._driver cimport CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUresult
from gpumem._page_moves cimport space_execute, space_finish, space_undo
from gpumem._page_plan cimport plan_free, space_plan, space_plan_trim
from gpumem._pages cimport Demand, Plan, Space

cdef enum:
    BACK_OFF_FLOOR = 8192       # bytes; a smaller region is not worth asking for


cdef int take(ArenaCore* arena, uint64_t nbytes, uint32_t stream, Block* block) noexcept nogil:
    # As the fast path, but for the caches.
    cdef int status = BFC_OK
    cdef uint32_t index
    cdef Bfc* table = table_for(arena, nbytes)
    lock_acquire(&arena.lock)
    if arena.closed:
        lock_release(&arena.lock)
        return ARENA_CLOSED
    cache_publish(arena, cache_find(arena))
    index = bfc_take(table, round_to_quantum(nbytes), nbytes, stream, &status)
    if index != NIL:
        hand_out(arena, table, index, block)
    lock_release(&arena.lock)
    if index != NIL:
        return ARENA_OK
    return ARENA_NO_METADATA if status == BFC_NO_METADATA else ARENA_OVER_LIMIT


cdef bint take_unfinished(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                          Block* block) noexcept nogil:
    cdef uint32_t index = NIL
    cdef Bfc* table = table_for(arena, nbytes)
    lock_acquire(&arena.lock)
    if not arena.closed:
        index = take_behind(arena, table, nbytes, stream)
    if index != NIL:
        hand_out(arena, table, index, block)
    lock_release(&arena.lock)
    return index != NIL


cdef int grow(ArenaCore* arena, uint64_t nbytes, uint32_t stream, Block* block) noexcept nogil:
    if arena.settings.paged:
        return grow_pages(arena, nbytes, stream, block)
    return grow_region(arena, nbytes, stream, block)


cdef int grow_pages(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                    Block* block) noexcept nogil:
    # With the grow lock. Where the driver has no memory left, once more from idle pages alone.
    # All streams are asked, the taker's too: views left by earlier moves retire when it is known
    # that their work is done.
    cdef Demand demand
    cdef int status
    demand.size = round_to_quantum(nbytes)
    demand.requested = nbytes
    demand.lane = stream
    demand.hard_limit = <uint64_t>1 << 62
    if arena.settings.max_mem:
        demand.hard_limit = arena.settings.max_mem
    settle_streams(arena, LANE_RELEASED)
    status = build_block(arena, &demand, block)
    if status == ARENA_DRIVER_REFUSED and arena.last_code == CUDA_ERROR_OUT_OF_MEMORY:
        demand.hard_limit = arena_reserved(arena)
        status = build_block(arena, &demand, block)
        if status == ARENA_OVER_LIMIT:
            status = ARENA_DRIVER_REFUSED
    return status


cdef int build_block(ArenaCore* arena, Demand* demand, Block* block) noexcept nogil:
    cdef Bfc* table = table_for(arena, demand.size)
    cdef Space* space = &arena.spaces[1 if table == &arena.small else 0]
    cdef Plan plan
    cdef CUresult code
    cdef uint64_t epoch
    cdef bint planned
    lock_acquire(&arena.lock)
    if arena.settings.reuse == REUSE_WAIT:
        wait_for_others(arena, demand.lane)
    set_share_limit(arena, demand)
    planned = space_plan(space, demand, &plan)
    forget_waits(arena)
    if not planned:
        lock_release(&arena.lock)
        plan_free(&plan)
        return ARENA_OVER_LIMIT
    if plan.over_limit:
        take_plan_back(arena, space, &plan, demand)
        lock_release(&arena.lock)
        plan_free(&plan)
        return ARENA_OVER_LIMIT
    lock_release(&arena.lock)
    code = space_execute(space, &plan, arena.place, &arena.backing.calls)
    lock_acquire(&arena.lock)
    if code == CUDA_SUCCESS:
        epoch = arena.streams[demand.lane].epoch
        space_finish(space, &plan, demand, epoch)
        note_reserved(arena)
        hand_out(arena, table, plan.chunk, block)
    else:
        arena.last_code = <int32_t>code
        take_plan_back(arena, space, &plan, demand)
    lock_release(&arena.lock)
    plan_free(&plan)
    return ARENA_OK if code == CUDA_SUCCESS else ARENA_DRIVER_REFUSED


cdef void take_plan_back(ArenaCore* arena, Space* space, Plan* plan,
                         const Demand* demand) noexcept nogil:
    # What was claimed becomes free in the taker's running epoch; it must be seen to end.
    space_undo(space, plan, demand, arena.streams[demand.lane].epoch, arena.place)
    arena.streams[demand.lane].dirty = True


cdef inline void set_share_limit(const ArenaCore* arena, Demand* demand) noexcept nogil:
    cdef uint64_t live = arena_in_use(arena) + demand.size
    demand.live_peak = live if live > arena.stats.max_in_use else arena.stats.max_in_use
    demand.reserved = arena_reserved(arena)
    demand.share_limit = demand.live_peak + <uint64_t>(
        <double>demand.live_peak * arena.settings.move_share)
    if demand.share_limit > demand.hard_limit:
        demand.share_limit = demand.hard_limit


cdef int grow_region(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                     Block* block) noexcept nogil:
    # With the grow lock. Reserves a region without the arena lock, then adds it and takes the
    # block from it in one step, so that no other thread can take it away in between.
    cdef uint64_t size = round_to_quantum(nbytes)
    cdef uint64_t room = arena_room(arena)
    cdef uint64_t running, wanted, address
    cdef bint forced = False
    cdef uint32_t region, index
    cdef int status = BFC_OK
    if size > room:
        return ARENA_OVER_LIMIT
    running = next_region_size(arena, size, &forced)
    wanted = running if running < room else room
    if not reserve_with_back_off(arena, &wanted, size, &address):
        return ARENA_DRIVER_REFUSED
    lock_acquire(&arena.lock)
    if bfc_add_region(&arena.table, address, wanted, False, &region) != BFC_OK:
        lock_release(&arena.lock)
        arena.backing.release(&arena.backing, address, wanted)
        return ARENA_NO_METADATA
    arena.stats.num_extensions += 1
    note_reserved(arena)
    advance_growth(arena, running, forced)
    index = bfc_take_from(&arena.table, size, nbytes, LANE_RELEASED, 0, stream, &status)
    if index != NIL:
        hand_out(arena, &arena.table, index, block)
    lock_release(&arena.lock)
    return ARENA_OK if index != NIL else ARENA_NO_METADATA


cdef uint64_t next_region_size(const ArenaCore* arena, uint64_t size,
                               bint* forced) noexcept nogil:
    # Doubling starts at initial_chunk. A request larger than the running size doubles it as often
    # as needed, beyond the cap if it must; only a growth that needed none lets it double after.
    # Changes nothing: the driver may refuse, and a failure must not steer later growth.
    cdef uint64_t running = arena.next_region
    if arena.settings.extend == EXTEND_SAME_AS_REQUESTED:
        return size
    while size > running:
        forced[0] = True
        running = size if running > (<uint64_t>1 << 62) else running * 2
    return running


cdef void advance_growth(ArenaCore* arena, uint64_t running, bint forced) noexcept nogil:
    if arena.settings.extend == EXTEND_SAME_AS_REQUESTED:
        return
    if forced:
        arena.next_region = running
    elif running < arena.settings.max_extend // 2:
        arena.next_region = running * 2
    else:
        arena.next_region = arena.settings.max_extend


cdef bint reserve_with_back_off(ArenaCore* arena, uint64_t* wanted, uint64_t size,
                                uint64_t* address) noexcept nogil:
    # A driver that refuses a region is asked for nine tenths of it, until that is less than needed.
    cdef CUresult code
    while True:
        code = arena.backing.reserve(&arena.backing, wanted[0], address)
        if code == CUDA_SUCCESS:
            return True
        arena.last_code = <int32_t>code
        if code != CUDA_ERROR_OUT_OF_MEMORY or wanted[0] == size:
            return False
        wanted[0] = round_to_quantum(wanted[0] // 10 * 9)
        if wanted[0] < size or wanted[0] < BACK_OFF_FLOOR:
            wanted[0] = size


cdef uint64_t arena_room(const ArenaCore* arena) noexcept nogil:
    # Bytes that max_mem still allows to reserve, in quanta.
    if arena.settings.max_mem == 0:
        return <uint64_t>1 << 63
    if arena_reserved(arena) >= arena.settings.max_mem:
        return 0
    return (arena.settings.max_mem - arena_reserved(arena)) & ~<uint64_t>(QUANTUM - 1)


cdef inline void note_reserved(ArenaCore* arena) noexcept nogil:
    if arena_reserved(arena) > arena.stats.max_reserved:
        arena.stats.max_reserved = arena_reserved(arena)


cdef uint64_t release_idle(ArenaCore* arena) noexcept nogil:
    # With the grow lock: gives back every region without a used block, except persistent ones.
    # Also those with queued work: the driver's free waits for it.
    cdef uint64_t total = trim_pages(arena)
    cdef uint64_t bytes_released = release_one(arena, False)
    while bytes_released:
        arena.stats.num_shrinkages += 1
        total += bytes_released
        bytes_released = release_one(arena, False)
    return total


cdef uint64_t trim_pages(ArenaCore* arena) noexcept nogil:
    # With the grow lock: gives back every page that is idle and has no queued work. Addresses stay.
    cdef uint64_t before = arena_reserved(arena)
    cdef Plan plan
    cdef uint32_t i
    if not arena.settings.paged:
        return 0
    for i in range(2):
        lock_acquire(&arena.lock)
        if space_plan_trim(&arena.spaces[i], &plan):
            lock_release(&arena.lock)
            space_execute(&arena.spaces[i], &plan, arena.place, &arena.backing.calls)
            lock_acquire(&arena.lock)
            space_finish(&arena.spaces[i], &plan, NULL, 0)
        lock_release(&arena.lock)
        plan_free(&plan)
    return before - arena_reserved(arena)


cdef uint64_t release_retired(ArenaCore* arena) noexcept nogil:
    # With the grow lock: gives back the regions of persistent blocks that were freed. Looks without
    # the arena lock: one that is being freed now goes back the next time.
    cdef uint64_t total = 0
    while load32(&arena.retired):
        total += release_one(arena, True)
    return total


cdef uint64_t release_one(ArenaCore* arena, bint persistent) noexcept nogil:
    # Takes one idle region out of the books, then gives it to the driver. Returns its bytes.
    cdef uint32_t region
    cdef uint64_t address = 0
    cdef uint64_t size = 0
    lock_acquire(&arena.lock)
    for region in range(arena.table.region_count):
        if (bfc_region_is_idle(&arena.table, region)
                and (arena.table.regions[region].persistent != 0) == persistent):
            address = arena.table.regions[region].address
            size = arena.table.regions[region].size
            bfc_remove_region(&arena.table, region)
            if persistent:
                store32(&arena.retired, arena.retired - 1)
            break
    lock_release(&arena.lock)
    if size:
        arena.backing.release(&arena.backing, address, size)
    return size


cdef bint shrink_may_help(const ArenaCore* arena, uint64_t nbytes,
                          int status) noexcept nogil:
    # Not for a block that is over the limit all by itself: it must not cost the others' regions.
    if status == ARENA_OVER_LIMIT:
        return round_to_quantum(nbytes) <= arena.settings.max_mem
    return status == ARENA_DRIVER_REFUSED


cdef int add_own_region(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                        Block* block) noexcept nogil:
    # With the grow lock: a region of exactly this block.
    cdef uint64_t size = round_to_quantum(nbytes)
    cdef uint64_t address
    cdef uint32_t region
    cdef CUresult code
    if arena.closed:
        return ARENA_CLOSED
    if size > arena_room(arena):
        return ARENA_OVER_LIMIT
    code = arena.backing.reserve(&arena.backing, size, &address)
    if code != CUDA_SUCCESS:
        arena.last_code = <int32_t>code
        return ARENA_DRIVER_REFUSED
    lock_acquire(&arena.lock)
    if bfc_add_region(&arena.table, address, size, True, &region) != BFC_OK:
        lock_release(&arena.lock)
        arena.backing.release(&arena.backing, address, size)
        return ARENA_NO_METADATA
    note_reserved(arena)
    hand_out(arena, &arena.table, bfc_take_persistent(&arena.table, region, nbytes, stream),
             block)
    lock_release(&arena.lock)
    return ARENA_OK

"""Blocks, growth, life and death of an arena; see _arena_types.pxd for locks and rules."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from gpumem._arena_streams cimport (
    add_stream,
    destroy_events,
    forget_waits,
    settle_streams,
    switch_needs_event,
    switch_stream,
    take_behind,
    wait_for_others,
)
from gpumem._arena_types cimport (
    ARENA_DEAD,
    ARENA_DRIVER_REFUSED,
    ARENA_IN_USE,
    ARENA_MISS,
    ARENA_NO_METADATA,
    ARENA_OK,
    ARENA_OVER_LIMIT,
    ARENA_STALE,
    ArenaCore,
    ArenaSettings,
    Block,
    EXTEND_SAME_AS_REQUESTED,
    IN_SMALL,
    LEGACY_STREAM,
    Lock,
    REUSE_NEVER,
    REUSE_WAIT,
    arena_in_use,
    arena_reserved,
    lock_acquire,
    lock_init,
    lock_release,
    table_for,
    table_of,
)
from gpumem._backing cimport Backing
from gpumem._bfc cimport (
    BFC_NO_METADATA,
    BFC_OK,
    Bfc,
    CHUNK_HOLE,
    Chunk,
    LANE_RELEASED,
    NIL,
    QUANTUM,
    SPLIT_ORT,
    SPLIT_TIGHT,
    bfc_add_region,
    bfc_flush,
    bfc_free_all,
    bfc_give,
    bfc_init,
    bfc_region_is_idle,
    bfc_remove_region,
    bfc_resolve,
    bfc_take,
    bfc_take_from,
    bfc_take_persistent,
    handle_of,
    round_to_quantum,
)
from gpumem._bfc_check cimport bfc_check, bfc_invariant
from gpumem._driver cimport (
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    Place,
    place_is_dead,
)
from gpumem._lease cimport Lease, lease_create
from gpumem._page_moves cimport space_execute, space_finish, space_undo
from gpumem._page_plan cimport plan_free, space_plan, space_plan_trim
from gpumem._page_space cimport space_create, space_destroy
from gpumem._pages cimport Demand, Plan, Space

cdef extern from *:
    """
    static inline int32_t gm_add(int32_t *count, int32_t by) {
        return __atomic_add_fetch(count, by, __ATOMIC_ACQ_REL);
    }
    #ifdef GPUMEM_DEBUG
    enum { GM_DEBUG = 1 };
    #else
    enum { GM_DEBUG = 0 };
    #endif
    #include <stdio.h>
    #include <stdlib.h>
    static inline void gm_panic(const char *invariant) {
        fprintf(stderr, "gpumem: an arena's books are broken: it does not hold that %s\\n",
                invariant);
        abort();
    }
    """
    void gm_panic(const char* invariant) noexcept nogil
    int32_t gm_add(int32_t* count, int32_t by) noexcept nogil
    enum:
        GM_DEBUG

cdef enum:
    BACK_OFF_FLOOR = 8192       # bytes; a smaller region is not worth asking for
    RANGE_BYTES = 4398046511104  # 4 TiB of address space for a paged arena's large blocks

# Arenas that nobody refers to any more; their regions go back to the driver at the next call
# that may block. Finalizers put them here, because they must neither block nor call the driver.
cdef ArenaCore* retired_arenas = NULL
cdef Lock retired_lock
lock_init(&retired_lock)


# ---- the fast path: one lock, one search, no driver ----------------------------------------------

cdef int arena_allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                             Block* block) noexcept nogil:
    cdef int status = BFC_OK
    cdef uint32_t index
    cdef Bfc* table
    if place_is_dead(arena.place):
        return ARENA_DEAD
    if arena.settings.passthrough:
        return ARENA_MISS
    lock_acquire(&arena.lock)
    if arena.last_stream != stream and switch_needs_event(arena):
        lock_release(&arena.lock)
        return ARENA_MISS
    arena.last_stream = stream
    table = table_for(arena, nbytes)
    index = bfc_take(table, round_to_quantum(nbytes), nbytes, stream, &status)
    if index != NIL:
        hand_out(arena, table, index, block)
    lock_release(&arena.lock)
    return ARENA_OK if index != NIL else ARENA_MISS


cdef int arena_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                        Block* block) noexcept nogil:
    cdef int status = arena_allocate_fast(arena, nbytes, stream, block)
    if status != ARENA_MISS:
        return status
    return arena_allocate_slow(arena, nbytes, stream, block)


cdef int arena_free(ArenaCore* arena, uint64_t handle, uint32_t stream) noexcept nogil:
    cdef int status
    if arena.settings.passthrough:
        return free_through(arena, handle, stream)
    lock_acquire(&arena.lock)
    status = take_back(arena, handle, stream)
    lock_release(&arena.lock)
    return status


cdef inline void hand_out(ArenaCore* arena, const Bfc* table, uint32_t index,
                          Block* block) noexcept nogil:
    cdef uint64_t size = table.chunks[index].size
    block.address = table.chunks[index].address
    block.size = size
    block.handle = handle_of(table, index) | (IN_SMALL if table == &arena.small else 0)
    arena.stats.num_allocs += 1
    if arena_in_use(arena) > arena.stats.max_in_use:
        arena.stats.max_in_use = arena_in_use(arena)
    if size > arena.stats.max_alloc_size:
        arena.stats.max_alloc_size = size
    if GM_DEBUG:
        require_sound(arena)


cdef inline int take_back(ArenaCore* arena, uint64_t handle, uint32_t stream) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index, region
    handle &= ~<uint64_t>IN_SMALL
    if bfc_resolve(table, handle, &index) != BFC_OK:
        return ARENA_STALE
    region = table.chunks[index].region
    if table.regions[region].persistent:
        persistent_unuse(arena, handle)
    else:
        arena.streams[stream].dirty = True
        bfc_give(table, handle, stream, arena.streams[stream].epoch)
    arena.stats.num_frees += 1
    if GM_DEBUG:
        require_sound(arena)
    return ARENA_OK


cdef void require_sound(const ArenaCore* arena) noexcept nogil:
    # Debug builds only: stop at the operation that broke an invariant, not where it shows later.
    cdef int broken = check_tables(arena)
    if broken:
        gm_panic(bfc_invariant(broken))


# ---- the slow path: ask, grow, give back, fail ---------------------------------------------------

cdef int arena_allocate_slow(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                             Block* block) noexcept nogil:
    # Order: an event for the stream served before, the arena as it is, blocks that other streams
    # have finished with, a new region, regions that are idle.
    cdef int status
    if arena.settings.passthrough:
        return allocate_through(arena, nbytes, stream, block)
    arena_reap()
    switch_stream(arena, stream)
    status = take(arena, nbytes, stream, block)
    if status != ARENA_OVER_LIMIT:
        return status
    if arena.settings.reuse != REUSE_NEVER:
        if settle_streams(arena, stream) and take(arena, nbytes, stream, block) == ARENA_OK:
            return ARENA_OK
        if arena.settings.reuse == REUSE_WAIT and take_unfinished(arena, nbytes, stream, block):
            return ARENA_OK
    lock_acquire(&arena.grow_lock)
    release_retired(arena)
    status = take(arena, nbytes, stream, block)     # another thread may have grown meanwhile
    if status != ARENA_OK:
        status = grow(arena, nbytes, stream, block)
    if shrink_may_help(arena, nbytes, status):
        if release_idle(arena) != 0:
            status = grow(arena, nbytes, stream, block)
    lock_release(&arena.grow_lock)
    return status


cdef inline bint shrink_may_help(const ArenaCore* arena, uint64_t nbytes,
                                 int status) noexcept nogil:
    # Not for a block that is over the limit all by itself: it must not cost the others' regions.
    if status == ARENA_OVER_LIMIT:
        return round_to_quantum(nbytes) <= arena.settings.max_mem
    return status == ARENA_DRIVER_REFUSED


cdef int take(ArenaCore* arena, uint64_t nbytes, uint32_t stream, Block* block) noexcept nogil:
    # As the fast path, over all free space: blocks kept for their size are merged first.
    cdef int status = BFC_OK
    cdef uint32_t index
    cdef Bfc* table = table_for(arena, nbytes)
    lock_acquire(&arena.lock)
    bfc_flush(table)
    index = bfc_take(table, round_to_quantum(nbytes), nbytes, stream, &status)
    if index != NIL:
        hand_out(arena, table, index, block)
    lock_release(&arena.lock)
    if index != NIL:
        return ARENA_OK
    return ARENA_NO_METADATA if status == BFC_NO_METADATA else ARENA_OVER_LIMIT


cdef bint take_unfinished(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                          Block* block) noexcept nogil:
    cdef uint32_t index
    cdef Bfc* table = table_for(arena, nbytes)
    lock_acquire(&arena.lock)
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
    bfc_flush(table)
    set_share_limit(arena, demand)
    planned = space_plan(space, demand, &plan)
    forget_waits(arena)
    if not planned:
        lock_release(&arena.lock)
        plan_free(&plan)
        return ARENA_OVER_LIMIT
    lock_release(&arena.lock)
    code = space_execute(space, &plan, arena.place, &arena.backing.calls)
    lock_acquire(&arena.lock)
    epoch = arena.streams[demand.lane].epoch
    if code == CUDA_SUCCESS:
        space_finish(space, &plan, demand, epoch)
        note_reserved(arena)
        hand_out(arena, table, plan.chunk, block)
    else:
        arena.last_code = <int32_t>code
        space_undo(space, &plan, demand, epoch, arena.place)
    lock_release(&arena.lock)
    plan_free(&plan)
    return ARENA_OK if code == CUDA_SUCCESS else ARENA_DRIVER_REFUSED


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


# ---- giving regions back -------------------------------------------------------------------------

cdef int arena_shrink(ArenaCore* arena, uint64_t* released) noexcept nogil:
    if place_is_dead(arena.place):
        return ARENA_DEAD
    arena_reap()
    if arena.settings.reuse != REUSE_NEVER:
        settle_streams(arena, LANE_RELEASED)
    lock_acquire(&arena.grow_lock)
    released[0] = release_retired(arena) + release_idle(arena)
    arena.next_region = arena.settings.initial_growth_chunk
    lock_release(&arena.grow_lock)
    return ARENA_OK


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
        bfc_flush(arena.spaces[i].table)
        if space_plan_trim(&arena.spaces[i], &plan):
            lock_release(&arena.lock)
            space_execute(&arena.spaces[i], &plan, arena.place, &arena.backing.calls)
            lock_acquire(&arena.lock)
            space_finish(&arena.spaces[i], &plan, NULL, 0)
        lock_release(&arena.lock)
        plan_free(&plan)
    return before - arena_reserved(arena)


cdef uint64_t release_retired(ArenaCore* arena) noexcept nogil:
    # With the grow lock: gives back the regions of persistent blocks that were freed.
    cdef uint64_t total = 0
    while arena.retired:
        total += release_one(arena, True)
    return total


cdef uint64_t release_one(ArenaCore* arena, bint persistent) noexcept nogil:
    # Takes one idle region out of the books, then gives it to the driver. Returns its bytes.
    cdef uint32_t region
    cdef uint64_t address = 0
    cdef uint64_t size = 0
    lock_acquire(&arena.lock)
    bfc_flush(&arena.table)
    for region in range(arena.table.region_count):
        if (bfc_region_is_idle(&arena.table, region)
                and (arena.table.regions[region].persistent != 0) == persistent):
            address = arena.table.regions[region].address
            size = arena.table.regions[region].size
            bfc_remove_region(&arena.table, region)
            if persistent:
                arena.retired -= 1
            break
    lock_release(&arena.lock)
    if size:
        arena.backing.release(&arena.backing, address, size)
    return size


# ---- blocks with a region of their own ---------------------------------------------------------

cdef int arena_allocate_persistent(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                                   Block* block) noexcept nogil:
    cdef int status
    if place_is_dead(arena.place):
        return ARENA_DEAD
    arena_reap()
    lock_acquire(&arena.grow_lock)
    release_retired(arena)
    status = add_own_region(arena, nbytes, stream, block)
    if shrink_may_help(arena, nbytes, status):
        if release_idle(arena) != 0:
            status = add_own_region(arena, nbytes, stream, block)
    if status == ARENA_OK:
        lock_acquire(&arena.lock)
        arena.stats.num_reserves += 1
        lock_release(&arena.lock)
    lock_release(&arena.grow_lock)
    return status


cdef int add_own_region(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                        Block* block) noexcept nogil:
    # With the grow lock: a region of exactly this block.
    cdef uint64_t size = round_to_quantum(nbytes)
    cdef uint64_t address
    cdef uint32_t region
    cdef CUresult code
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


cdef inline void persistent_unuse(ArenaCore* arena, uint64_t handle) noexcept nogil:
    # The region goes back at the next call that may block: this may be a finalizer.
    bfc_give(&arena.table, handle, LANE_RELEASED, 0)
    arena.retired += 1


cdef int allocate_through(ArenaCore* arena, uint64_t nbytes, uint32_t stream,
                          Block* block) noexcept nogil:
    # enable=False: one driver allocation per block.
    cdef int status
    if place_is_dead(arena.place):
        return ARENA_DEAD
    lock_acquire(&arena.grow_lock)
    status = add_own_region(arena, nbytes, stream, block)
    lock_release(&arena.grow_lock)
    return status


cdef int free_through(ArenaCore* arena, uint64_t handle, uint32_t stream) noexcept nogil:
    cdef int status
    lock_acquire(&arena.lock)
    status = take_back(arena, handle, stream)
    lock_release(&arena.lock)
    if status != ARENA_OK or place_is_dead(arena.place):
        return status
    lock_acquire(&arena.grow_lock)
    release_retired(arena)
    lock_release(&arena.grow_lock)
    return status


# ---- life and death ------------------------------------------------------------------------------

cdef ArenaCore* arena_create(const ArenaSettings* settings, Backing backing) noexcept nogil:
    cdef ArenaCore* arena = <ArenaCore*>calloc(1, sizeof(ArenaCore))
    cdef uint64_t first = round_to_quantum(settings.initial_chunk)
    cdef uint32_t slot
    if arena == NULL:
        return NULL
    lock_init(&arena.lock)
    lock_init(&arena.grow_lock)
    arena.references = 1
    arena.settings = settings[0]
    arena.backing = backing
    arena.place = backing.place
    if settings.max_mem and first > settings.max_mem:
        first = round_to_quantum(settings.max_mem)
    arena.next_region = first
    if (bfc_init(&arena.table, SPLIT_ORT if settings.ort_split else SPLIT_TIGHT,
                 settings.max_dead) != BFC_OK
            or bfc_init(&arena.small, SPLIT_TIGHT, settings.max_dead) != BFC_OK):
        forget(arena)
        return NULL
    arena.table.merge_released = settings.reuse != REUSE_NEVER
    arena.small.merge_released = arena.table.merge_released
    if (add_stream(arena, <CUstream><uint64_t>LEGACY_STREAM, 0, &slot) != ARENA_OK
            or (settings.paged and not create_spaces(arena))):
        forget(arena)
        return NULL
    return arena


cdef bint create_spaces(ArenaCore* arena) noexcept nogil:
    # Addresses for many times the device's memory, so that moving never runs out of them.
    return (space_create(&arena.spaces[0], &arena.table, arena.place, RANGE_BYTES, True) == 0
            and space_create(&arena.spaces[1], &arena.small, arena.place, RANGE_BYTES // 8,
                             False) == 0)


cdef void forget(ArenaCore* arena) noexcept nogil:
    cdef Place* place = NULL if place_is_dead(arena.place) else arena.place
    space_destroy(&arena.spaces[0], place)
    space_destroy(&arena.spaces[1], place)
    bfc_free_all(&arena.table)
    bfc_free_all(&arena.small)
    free(arena.streams)
    free(arena)


cdef void arena_retain(ArenaCore* arena) noexcept nogil:
    gm_add(&arena.references, 1)


cdef void arena_drop(ArenaCore* arena) noexcept nogil:
    global retired_arenas
    if gm_add(&arena.references, -1) != 0:
        return
    lock_acquire(&retired_lock)
    arena.next_retired = retired_arenas
    retired_arenas = arena
    lock_release(&retired_lock)


cdef void arena_reap() noexcept nogil:
    # Destroys the arenas that finalizers left; called where blocking is allowed.
    global retired_arenas
    cdef ArenaCore* arena
    cdef ArenaCore* following
    if retired_arenas == NULL:
        return
    lock_acquire(&retired_lock)
    arena = retired_arenas
    retired_arenas = NULL
    lock_release(&retired_lock)
    while arena != NULL:
        following = arena.next_retired
        if not place_is_dead(arena.place):
            release_everything(arena)
        forget(arena)
        arena = following


cdef int arena_close(ArenaCore* arena) noexcept nogil:
    # Gives everything back now. Refused while a block is handed out.
    if place_is_dead(arena.place):
        arena.closed = True
        return ARENA_OK
    arena_reap()
    lock_acquire(&arena.grow_lock)
    lock_acquire(&arena.lock)
    if arena.table.used_chunks or arena.small.used_chunks:
        lock_release(&arena.lock)
        lock_release(&arena.grow_lock)
        return ARENA_IN_USE
    arena.closed = True
    lock_release(&arena.lock)
    release_everything(arena)
    lock_release(&arena.grow_lock)
    return ARENA_OK


cdef void release_everything(ArenaCore* arena) noexcept nogil:
    while release_one(arena, False) or release_one(arena, True):
        pass
    destroy_events(arena)
    if arena.settings.paged:
        space_destroy(&arena.spaces[0], arena.place)
        space_destroy(&arena.spaces[1], arena.place)
        bfc_free_all(&arena.table)
        bfc_free_all(&arena.small)


cdef int arena_check(ArenaCore* arena) noexcept nogil:
    cdef int broken
    lock_acquire(&arena.lock)
    broken = check_tables(arena)
    lock_release(&arena.lock)
    return broken


cdef inline int check_tables(const ArenaCore* arena) noexcept nogil:
    cdef int broken = bfc_check(&arena.table)
    return broken if broken else bfc_check(&arena.small)


cdef Chunk* arena_copy_chunks(ArenaCore* arena, uint32_t* count) noexcept nogil:
    cdef Chunk* copy
    count[0] = 0
    lock_acquire(&arena.lock)
    bfc_flush(&arena.table)
    bfc_flush(&arena.small)
    copy = <Chunk*>malloc((arena.table.count + arena.small.count + 1) * sizeof(Chunk))
    if copy != NULL:
        copy_chunks(&arena.table, 0, copy, count)
        copy_chunks(&arena.small, arena.table.region_count, copy, count)
    lock_release(&arena.lock)
    return copy


cdef void copy_chunks(const Bfc* table, uint32_t first_region, Chunk* copy,
                      uint32_t* count) noexcept nogil:
    # Regions of the second table are numbered on from the first one's.
    cdef uint32_t region, index
    for region in range(table.region_count):
        if table.regions[region].size == 0:
            continue
        index = table.regions[region].first
        while index != NIL:
            if table.chunks[index].state != CHUNK_HOLE:
                copy[count[0]] = table.chunks[index]
                copy[count[0]].region += first_region
                count[0] += 1
            index = table.chunks[index].next


# ---- leases --------------------------------------------------------------------------------------

cdef Lease* arena_lease(ArenaCore* arena, uint64_t handle, uint32_t stream) noexcept nogil:
    cdef Lease* lease = lease_create(handle, 0, 0, stream, arena, release_lease)
    if lease != NULL:
        arena_retain(arena)
    return lease


cdef void release_lease(Lease* lease) noexcept nogil:
    cdef ArenaCore* arena = <ArenaCore*>lease.owner
    if not place_is_dead(arena.place):
        arena_free(arena, lease.handle, lease.stream)
    arena_drop(arena)


cdef void arena_move_lease(ArenaCore* arena, Lease* lease, uint32_t stream) noexcept nogil:
    cdef Bfc* table
    cdef uint32_t index
    lock_acquire(&arena.lock)
    lease.stream = stream
    table = table_of(arena, lease.handle)
    if bfc_resolve(table, lease.handle & ~<uint64_t>IN_SMALL, &index) == BFC_OK:
        table.chunks[index].lane = stream
    lock_release(&arena.lock)

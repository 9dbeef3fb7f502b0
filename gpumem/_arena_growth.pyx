"""More memory for an arena, and less: regions; with the grow lock held."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from gpumem._arena_books cimport charge_parent, finish_allocate, note_reserved
from gpumem._arena_budget cimport (
    arena_budget_allows,
    arena_charge,
    arena_charge_region,
    arena_reconcile,
)
from gpumem._arena_cache cimport cache_find
from gpumem._arena_pages cimport grow_pages, persistent_release, persistent_reserve, trim_pages
from gpumem._arena_recorded cimport note_memory
from gpumem._arena_types cimport (
    ALLOCATE_PERSISTENT,
    ALLOCATE_SHAREABLE,
    ARENA_CLOSED,
    ARENA_DRIVER_REFUSED,
    ARENA_NO_METADATA,
    ARENA_OK,
    ARENA_OVER_BUDGET,
    ARENA_OVER_LIMIT,
    arena_reserved,
    ArenaCore,
    Block,
    EXTEND_SAME_AS_REQUESTED,
)
from gpumem._backing cimport Backing, mapped_find
from gpumem._bfc cimport (
    bfc_add_region,
    BFC_OK,
    bfc_region_is_idle,
    bfc_remove_region,
    bfc_allocate_from,
    bfc_allocate_persistent,
    SLOT_RELEASED,
    NIL,
    QUANTUM,
    round_to_quantum,
)
from gpumem._driver cimport CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUresult
from gpumem._recorder cimport REC_RELEASE, REC_RESERVE
from gpumem._support.atomics cimport load32, load64, store32
from gpumem._support.lock cimport lock_acquire, lock_release

cdef enum:
    BACK_OFF_FLOOR = 8192       # bytes; a smaller region is not worth asking for


cdef int grow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, Block* block) noexcept nogil:
    cdef int status
    if arena.settings.paged:
        status = grow_pages(arena, nbytes, stream_slot, block)
    else:
        status = grow_region(arena, nbytes, stream_slot, block)
    arena_reconcile(arena)
    return status


cdef int grow_region(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                     Block* block) noexcept nogil:
    # With the grow lock. Reserves a region without the arena lock, then adds it and takes the
    # block from it in one step, so that no other thread can take it away in between.
    cdef uint64_t size = whole_granules(&arena.backing, nbytes)
    cdef uint64_t room = arena_room(arena)
    cdef uint64_t running, wanted, address
    cdef bint forced = False
    cdef uint32_t region, index
    cdef int status = BFC_OK
    if size > room:
        return ARENA_OVER_LIMIT
    running = next_region_size(arena, size, &forced)
    wanted = max(size, part_granules(arena, min(running, room)))
    if not arena_charge_region(arena, size, &wanted):
        return ARENA_OVER_BUDGET
    if not reserve_with_back_off(arena, &wanted, size, &address):
        return ARENA_DRIVER_REFUSED
    lock_acquire(&arena.lock)
    if bfc_add_region(&arena.table, address, wanted, False, &region) != BFC_OK:
        lock_release(&arena.lock)
        arena.backing.release(&arena.backing, address, wanted)
        return ARENA_NO_METADATA
    arena.stats.num_extensions += 1
    note_reserved(arena)
    note_region(arena, REC_RESERVE, address, wanted)
    advance_growth(arena, running, forced)
    index = bfc_allocate_from(&arena.table, round_to_quantum(nbytes), nbytes, SLOT_RELEASED, 0,
                              stream_slot, &status)
    if index != NIL:
        finish_allocate(arena, cache_find(arena), &arena.table, index, block)
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
    cdef uint64_t less
    cdef CUresult code
    while True:
        code = arena.backing.reserve(&arena.backing, wanted[0], address)
        if code == CUDA_SUCCESS:
            return True
        arena.last_code = <int32_t>code
        arena.last_call = NULL
        if code != CUDA_ERROR_OUT_OF_MEMORY or wanted[0] == size:
            return False
        less = whole_granules(&arena.backing, wanted[0] // 10 * 9)
        wanted[0] = less if less < wanted[0] else wanted[0] - arena.backing.granule
        if wanted[0] < size or wanted[0] < BACK_OFF_FLOOR:
            wanted[0] = size


cdef inline uint64_t whole_granules(const Backing* backing, uint64_t nbytes) noexcept nogil:
    # Bytes of the least region that holds so many.
    return round_to_quantum(nbytes + backing.granule - QUANTUM) & ~(backing.granule - 1)


cdef inline uint64_t part_granules(const ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    # Bytes of the greatest region within so many.
    return nbytes & ~(arena.backing.granule - 1)


cdef uint64_t arena_room(const ArenaCore* arena) noexcept nogil:
    # Bytes that max_mem still allows to reserve, in quanta; an arena's graph pools count with it.
    cdef const ArenaCore* root = arena.parent if arena.parent != NULL else arena
    cdef uint64_t held = arena_reserved(root) + root.lent
    cdef uint64_t limit = load64(&root.settings.max_mem)
    if limit == 0:
        return <uint64_t>1 << 63
    if held >= limit:
        return 0
    return (limit - held) & ~<uint64_t>(QUANTUM - 1)


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


cdef uint64_t release_retired(ArenaCore* arena) noexcept nogil:
    # With the grow lock: gives back the regions of persistent blocks that were freed. Looks without
    # the arena lock: one that is being freed now goes back the next time.
    cdef uint64_t before = arena_reserved(arena)
    while load32(&arena.retired) and release_one(arena, True):
        pass
    return before - arena_reserved(arena)


cdef inline void note_region(ArenaCore* arena, uint32_t kind, uint64_t address,
                             uint64_t nbytes) noexcept nogil:
    # Locked. What is cut from pages is told page by page.
    if arena.tap.recorder != NULL and (
            not arena.settings.paged or mapped_find(&arena.shareable, address) != NULL):
        note_memory(arena, kind, address, nbytes)


cdef uint64_t release_one(ArenaCore* arena, bint persistent) noexcept nogil:
    # Takes one idle region out of the books, then gives it to the driver; one that is refused comes
    # back into the books, where nothing has been added since. Returns its bytes.
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
            charge_parent(arena)
            note_region(arena, REC_RELEASE, address, size)
            if persistent:
                store32(&arena.retired, arena.retired - 1)
            break
    lock_release(&arena.lock)
    if size == 0 or release_memory_of(arena, address, size):
        arena_reconcile(arena)
        return size
    lock_acquire(&arena.lock)
    bfc_add_region(&arena.table, address, size, persistent, &region)
    note_region(arena, REC_RESERVE, address, size)
    store32(&arena.retired, arena.retired + persistent)
    lock_release(&arena.lock)
    return 0


cdef bint release_memory_of(ArenaCore* arena, uint64_t address, uint64_t size) noexcept nogil:
    if mapped_find(&arena.shareable, address) != NULL:
        return arena.shareable.release(&arena.shareable, address, size) == CUDA_SUCCESS
    if arena.settings.paged:
        return persistent_release(arena, address)
    return arena.backing.release(&arena.backing, address, size) == CUDA_SUCCESS


cdef bint shrink_may_help(const ArenaCore* arena, uint64_t nbytes,
                          int status) noexcept nogil:
    # Not for a block that is over the limit all by itself: it must not cost the others' regions.
    if status == ARENA_OVER_LIMIT:
        return round_to_quantum(nbytes) <= arena.settings.max_mem
    if status == ARENA_OVER_BUDGET:
        return arena_budget_allows(arena, round_to_quantum(nbytes))
    return status == ARENA_DRIVER_REFUSED


cdef bint memory_is_out(const ArenaCore* arena, uint64_t nbytes, int status) noexcept nogil:
    if status == ARENA_DRIVER_REFUSED and arena.last_code != CUDA_ERROR_OUT_OF_MEMORY:
        return False
    return shrink_may_help(arena, nbytes, status)


cdef int add_own_region(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                        Block* block) noexcept nogil:
    # With the grow lock: a region of exactly this block, as far as the backing can.
    cdef int status = reserve_block(arena, nbytes, stream_slot, flags, block)
    arena_reconcile(arena)
    return status


cdef int reserve_block(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                       Block* block) noexcept nogil:
    cdef bint shareable = flags & ALLOCATE_SHAREABLE
    cdef Backing* backing = &arena.shareable if shareable else &arena.backing
    cdef uint64_t size = whole_granules(backing, nbytes)
    cdef uint64_t address
    cdef uint32_t region
    cdef int status
    if arena.closed:
        return ARENA_CLOSED
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
                    bfc_allocate_persistent(&arena.table, region, nbytes, stream_slot),
                    block)
    if flags & ALLOCATE_PERSISTENT:
        arena.stats.num_reserves += 1
    lock_release(&arena.lock)
    return ARENA_OK


cdef int reserve_own(ArenaCore* arena, Backing* backing, uint64_t size,
                     uint64_t* address) noexcept nogil:
    cdef CUresult code
    if arena.settings.paged and backing == &arena.backing:
        return persistent_reserve(arena, size, address)
    if size > arena_room(arena):
        return ARENA_OVER_LIMIT
    if not arena_charge(arena, size):
        return ARENA_OVER_BUDGET
    code = backing.reserve(backing, size, address)
    if code == CUDA_SUCCESS:
        return ARENA_OK
    arena.last_code = <int32_t>code
    arena.last_call = NULL if backing == &arena.backing else backing.call
    return ARENA_DRIVER_REFUSED

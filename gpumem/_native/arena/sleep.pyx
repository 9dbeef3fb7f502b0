"""Sleep and wake of one arena."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.bookkeeping cimport (
    arena_charge_pages_anew, arena_reconcile, charge_parent, note_reserved,
)
from gpumem._native.arena.growth cimport release_idle_beside, trim_pages
from gpumem._native.arena.streams cimport drain_streams, free_all_pending, wait_for_device
from gpumem._native.arena.thread_cache cimport caches_flush
from gpumem._native.arena.types cimport (
    apart_from, ARENA_CLOSED, ARENA_HALF_ASLEEP, ARENA_NO_COPY, ARENA_OK, ARENA_OVER_BUDGET,
    ARENA_OVER_LIMIT, arena_reserved, arena_reserved_now, ArenaCore, driver_refused, family_held,
    IN_SMALL, root_of, SPACES, STATE_ASLEEP, STATE_CLOSED, STATE_OPEN, table_of,
)
from gpumem._native.bfc cimport Bfc, bfc_resolve, BFC_OK, CHUNK_USED, handle_of, NIL, state_of
from gpumem._native.driver cimport (
    context_enter, context_leave, context_relax, context_restore, CUDA_SUCCESS, CUresult,
    CUstreamCaptureMode,
)
from gpumem._native.pages cimport (
    orphan_add, Sleeper, sleeper_add_piece, sleeper_forget, sleeper_forget_pages, sleeper_sleep,
    sleeper_wake, SleepPiece, space_drop_dormant, space_list_pages, StorePlace,
)
from gpumem._support.atomics cimport load64
from gpumem._support.lock cimport lock_acquire, lock_release


cdef bint arena_can_sleep(const ArenaCore* arena) noexcept nogil:
    return arena.settings.paged


cdef int arena_sleep(ArenaCore* arena, const StorePlace* place) noexcept nogil:
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef int status = ARENA_OK
    lock_acquire(&arena.grow_lock)
    if arena.closed == STATE_CLOSED:
        status = ARENA_CLOSED
    elif arena.closed == STATE_OPEN:
        # First of all: from here on no thread is given a block that the copy would miss.
        set_state(arena, STATE_ASLEEP)
        status = go_to_sleep(arena, place)
        if status != ARENA_OK and status != ARENA_HALF_ASLEEP:
            sleeper_forget(&arena.sleeper)
            set_state(arena, STATE_OPEN)
        arena_reconcile(arena)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return status


cdef int arena_wake(ArenaCore* arena) noexcept nogil:
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef int status = ARENA_OK
    lock_acquire(&arena.grow_lock)
    if arena.closed == STATE_CLOSED:
        status = ARENA_CLOSED
    elif arena.closed == STATE_ASLEEP:
        status = wake(arena)
        arena_reconcile(arena)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return status


cdef void set_state(ArenaCore* arena, int state) noexcept nogil:
    # What sleeps does not count in the limit that tags share.
    lock_acquire(&arena.lock)
    arena.closed = state
    charge_parent(arena)
    lock_release(&arena.lock)


# ---- going to sleep ------------------------------------------------------------------------------

cdef int go_to_sleep(ArenaCore* arena, const StorePlace* place) noexcept nogil:
    cdef Sleeper* sleeper = &arena.sleeper
    cdef const char* call = NULL
    cdef CUresult code = drain(arena)
    if code != CUDA_SUCCESS:
        return driver_refused(arena, code, "cuCtxSynchronize")
    caches_flush(arena)
    trim_pages(arena)
    code = drop_dormant(arena)
    if code != CUDA_SUCCESS:
        return driver_refused(arena, code, "cuMemUnmap")
    name_sleeper(arena)
    if not list_pages(arena) or place != NULL and not list_blocks(arena):
        return ARENA_NO_COPY
    code = sleeper_sleep(sleeper, place, &call)
    if code == CUDA_SUCCESS:
        return ARENA_OK
    if sleeper.no_store and sleeper.copied == 0:
        return ARENA_NO_COPY        # nothing has gone back yet
    return undo(arena, code, call)


cdef int undo(ArenaCore* arena, CUresult code, const char* call) noexcept nogil:
    # What went back comes again. Should that be refused too, the arena stays asleep, with its
    # copy, and a wake can be tried.
    cdef const char* again = NULL
    cdef bint no_store = arena.sleeper.no_store
    cdef CUresult undone = sleeper_wake(&arena.sleeper, &again)
    if undone == CUDA_SUCCESS and no_store:
        return ARENA_NO_COPY
    if undone == CUDA_SUCCESS:
        return driver_refused(arena, code, call)
    driver_refused(arena, undone, again)
    return ARENA_HALF_ASLEEP


cdef CUresult drain(ArenaCore* arena) noexcept nogil:
    # Everything queued on the device, on whatever stream: any of it may use a live block.
    cdef CUresult code = wait_for_device(arena)
    if code == CUDA_SUCCESS:
        drain_streams(arena, NULL)
        free_all_pending(arena)
    return code


cdef CUresult drop_dormant(ArenaCore* arena) noexcept nogil:
    # Views left from before a move; the pages keep their memory and place.
    cdef CUresult code = context_enter(arena.context)
    cdef int i
    if code != CUDA_SUCCESS:
        return code
    for i in range(SPACES):
        if code == CUDA_SUCCESS:
            code = space_drop_dormant(&arena.spaces[i], &arena.lock)
    context_leave(arena.context)
    return code


# ---- waking --------------------------------------------------------------------------------------

cdef int wake(ArenaCore* arena) noexcept nogil:
    cdef const char* call = NULL
    cdef CUresult code
    # What was freed meanwhile has no work queued on it, and the driver has nothing of it.
    caches_flush(arena)
    drain_streams(arena, NULL)
    trim_pages(arena)
    if not list_pages(arena):
        return ARENA_NO_COPY
    # Limit and budget before the driver: a refusal then leaves the arena asleep, as it was.
    if not limit_allows(arena):
        return ARENA_OVER_LIMIT
    if not arena_charge_pages_anew(arena):
        return ARENA_OVER_BUDGET
    code = sleeper_wake(&arena.sleeper, &call)
    if code != CUDA_SUCCESS:
        return driver_refused(arena, code, call)
    sleeper_forget(&arena.sleeper)
    set_state(arena, STATE_OPEN)
    lock_acquire(&arena.lock)
    note_reserved(arena)    # peaks may have been reset meanwhile
    lock_release(&arena.lock)
    return ARENA_OK


cdef bint limit_allows(ArenaCore* arena) noexcept nogil:
    # Other tags may have grown meanwhile; what is idle in them goes back first.
    cdef uint64_t limit = load64(&root_of(arena).settings.max_mem)
    cdef uint64_t wanted = arena_reserved(arena) - arena_reserved_now(arena)
    if limit == 0 or family_held(arena) + wanted <= limit:
        return True
    release_idle_beside(arena, False)
    return family_held(arena) + wanted <= limit


# ---- what sleeps ---------------------------------------------------------------------------------

cdef void name_sleeper(ArenaCore* arena) noexcept nogil:
    arena.sleeper.context = arena.context
    arena.sleeper.access = &arena.access
    arena.sleeper.calls = &arena.backing.calls
    arena.sleeper.owner = arena
    arena.sleeper.is_live = is_live
    arena.sleeper.orphan = keep_orphan


cdef bint list_pages(ArenaCore* arena) noexcept nogil:
    cdef bint listed = True
    cdef int i
    sleeper_forget_pages(&arena.sleeper)
    for i in range(SPACES):
        listed = listed and space_list_pages(&arena.spaces[i], &arena.sleeper)
    return listed


cdef bint list_blocks(ArenaCore* arena) noexcept nogil:
    # Under the lock; its blocks can only be freed afterwards, which a generation shows.
    cdef bint listed
    lock_acquire(&arena.lock)
    listed = list_table(arena, &arena.table, 0) and list_table(arena, &arena.small, IN_SMALL)
    lock_release(&arena.lock)
    return listed


cdef bint list_table(ArenaCore* arena, const Bfc* table, uint64_t mark) noexcept nogil:
    # What lies apart stays where it is.
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
    cdef uint32_t index
    return bfc_resolve(table, piece.block & ~<uint64_t>IN_SMALL, &index) == BFC_OK


cdef void keep_orphan(void* owner, uint64_t memory) noexcept nogil:
    orphan_add(&(<ArenaCore*>owner).spaces[0], memory)


cdef void copy_forget(ArenaCore* arena) noexcept nogil:
    arena.sleeper.store.place.keep = 0
    sleeper_forget(&arena.sleeper)

"""Release of memory to the driver, by regions or by pages."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.bookkeeping cimport arena_reconcile, note_region
from gpumem._native.arena.spans cimport spans_trim
from gpumem._native.arena.streams cimport (
    find_idle, has_unknown_work, query_stream, release_completed,
)
from gpumem._native.arena.family cimport shares_limit, tag_next
from gpumem._native.arena.types cimport (
    apart_from, arena_reserved, ArenaCore, LARGE_SPACE, live_peak, move_clock, PERSISTENT_SPACE,
    SMALL_SPACE, SPACES, StreamSlot, table_at, with_share,
)
from gpumem._native.backing cimport Backing, backing_release
from gpumem._native.bfc cimport (
    Bfc, bfc_add_region, bfc_free, bfc_region_is_idle, bfc_remove_region, Chunk, CHUNK_USED, NIL,
    SLOT_RELEASED,
)
from gpumem._native.driver cimport context_enter, context_leave, CUDA_SUCCESS, CUresult
from gpumem._native.pages cimport (
    budget_rested, budget_spend, GRANULE, orphans_release, Plan, plan_free, plan_note, Space,
    space_execute, space_finish, space_give_up_views, space_plan_trim, space_undo,
)
from gpumem._support.atomics cimport load32, locked_add64, store32
from gpumem._support.events cimport REC_RELEASE, REC_RESERVE
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport lock_acquire, lock_release, lock_try


# ---- regions -------------------------------------------------------------------------------------

cdef uint64_t release_all_idle(ArenaCore* arena) noexcept nogil:
    # A second try follows a call that the driver refuses.
    return release_idle(arena, 2) + release_idle_beside(arena)


cdef uint64_t release_idle(ArenaCore* arena, int tries) noexcept nogil:
    # Releases every region without a used block, except persistent ones and those with unfinished
    # work.
    cdef uint64_t total = trim_pages(arena) + spans_trim(arena)
    cdef int _i
    poll_idle_regions(arena)
    for _i in range(tries):
        total += release_each(arena, False, False)
    return total


cdef uint64_t release_each(ArenaCore* arena, bint persistent, bint with_wait) noexcept nogil:
    cdef uint64_t total = 0
    cdef uint64_t nbytes = release_one(arena, persistent, with_wait)
    while nbytes:
        total += nbytes
        nbytes = release_one(arena, persistent, with_wait)
    return total


cdef uint64_t release_waiting(ArenaCore* arena) noexcept nogil:
    if not has_waiting(arena):
        return 0
    poll_idle_regions(arena)
    return release_each(arena, False, True) + release_each(arena, True, True)


cdef uint64_t release_idle_beside(ArenaCore* arena) noexcept nogil:
    # An arena that is growing is skipped: two threads would wait for each other.
    cdef uint64_t total = 0
    cdef ArenaCore* other
    if not shares_limit(arena):
        return 0
    other = tag_next(arena, NULL)
    while other != NULL:
        if other != arena and lock_try(&other.grow_lock):
            find_idle(other)
            total += release_idle(other, 1)
            lock_release(&other.grow_lock)
        other = tag_next(arena, other)
    return total


cdef uint64_t release_retired(ArenaCore* arena, bint with_wait) noexcept nogil:
    # Reads the count without the arena lock: a block that is being freed now is found the next
    # time.
    cdef uint64_t before = arena_reserved(arena)
    # No search, which would poll the streams, finds a block that was passed through.
    if load32(&arena.retired) or arena.settings.passthrough:
        poll_idle_regions(arena)
    if load32(&arena.retired):
        release_each(arena, True, with_wait)
    return before - arena_reserved(arena)


cdef void poll_idle_regions(ArenaCore* arena) noexcept nogil:
    # Nothing is polled where no unfinished work keeps memory from being released.
    cdef const Uses* uses
    cdef const Bfc* table
    cdef uint32_t i
    cdef int number
    cdef bint polls
    lock_acquire(&arena.lock)
    for i in range(1, arena.table.stream_slot_count):
        arena.streams[i].holds_region = False
    # After the recorded streams are done, the block's own stream may still hold its region.
    uses = arena.pending_free
    polls = uses != NULL
    while uses != NULL:
        arena.streams[uses.stream_slot].holds_region = True
        uses = uses.next
    for number in range(2):
        table = table_at(arena, number)
        for i in range(table.region_count):
            if bfc_region_is_idle(table, i) and not region_is_done(arena, table, i):
                polls = True
    for i in range(1, arena.table.stream_slot_count):
        if arena.streams[i].holds_region and has_unknown_work(arena, i):
            query_stream(arena, i)
    lock_release(&arena.lock)
    if polls:
        release_completed(arena, SLOT_RELEASED)


cdef bint region_is_done(ArenaCore* arena, const Bfc* table, uint32_t region) noexcept nogil:
    # Returns whether all work is known to be done that was queued when its blocks were freed. Marks
    # the streams that have the unfinished work.
    cdef const Chunk* chunk
    cdef StreamSlot* stream
    cdef uint32_t index = table.regions[region].first
    cdef bint done = True
    while index != NIL:
        chunk = &table.chunks[index]
        stream = &arena.streams[chunk.stream_slot]
        if chunk.stream_slot != SLOT_RELEASED and chunk.epoch > stream.done:
            stream.holds_region = True
            done = False
        index = chunk.next
    return done


cdef uint64_t release_one(ArenaCore* arena, bint persistent, bint with_wait) noexcept nogil:
    return release_best(arena, persistent, with_wait, 0)


cdef uint64_t release_best(ArenaCore* arena, bint persistent, bint with_wait,
                           uint64_t wanted) noexcept nogil:
    # Removes an idle region from its table, then releases it to the driver: the smallest one of at
    # least `wanted` bytes, else the largest; with 0 the first. If that is refused it is added to
    # the table again, which has room for it. Returns its bytes.
    cdef Bfc* table
    cdef Bfc* found = NULL
    cdef int number
    cdef uint32_t i
    cdef uint32_t region = 0
    cdef uint64_t address = 0
    cdef uint64_t size = 0
    lock_acquire(&arena.lock)
    for number in range(2):
        table = table_at(arena, number)
        for i in range(table.region_count):
            if (bfc_region_is_idle(table, i) and (table.regions[i].persistent != 0) == persistent
                    and (with_wait or not waits_for_device(arena, table.regions[i].address))
                    and region_is_done(arena, table, i)
                    and (found == NULL or is_closer(table.regions[i].size, size, wanted))):
                found = table
                region = i
                size = table.regions[i].size
    if found != NULL:
        address = found.regions[region].address
        bfc_remove_region(found, region)
        note_region(arena, REC_RELEASE, address, size)
        if persistent:
            store32(&arena.retired, arena.retired - 1)
    lock_release(&arena.lock)
    if size == 0 or release_memory_of(arena, address, size):
        if size != 0 and not persistent:
            locked_add64(&arena.stats.num_shrinkages, 1)
        arena_reconcile(arena)
        return size
    lock_acquire(&arena.lock)
    bfc_add_region(found, address, size, persistent, &region)
    note_region(arena, REC_RESERVE, address, size)
    store32(&arena.retired, arena.retired + persistent)
    lock_release(&arena.lock)
    return 0


cdef inline bint is_closer(uint64_t size, uint64_t than, uint64_t wanted) noexcept nogil:
    if size >= wanted:
        return wanted != 0 and (size < than or than < wanted)
    return than < size


cdef void release_regions(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef uint64_t released = 1
    poll_idle_regions(arena)
    while nbytes and released:
        released = release_best(arena, False, True, nbytes)
        nbytes -= min(released, nbytes)


cdef bint release_memory_of(ArenaCore* arena, uint64_t address, uint64_t size) noexcept nogil:
    cdef Backing* backing = backing_of(arena, address)
    if backing == NULL:
        return persistent_release(arena, address)
    return backing_release(backing, address, size) == CUDA_SUCCESS


cdef bint waits_for_device(ArenaCore* arena, uint64_t address) noexcept nogil:
    cdef const Backing* backing = backing_of(arena, address)
    return backing != NULL and backing.waits


cdef bint has_waiting(ArenaCore* arena) noexcept nogil:
    cdef const Bfc* table
    cdef uint32_t region
    cdef int number
    cdef bint found = False
    lock_acquire(&arena.lock)
    for number in range(2):
        table = table_at(arena, number)
        for region in range(table.region_count):
            if (bfc_region_is_idle(table, region)
                    and waits_for_device(arena, table.regions[region].address)):
                found = True
    lock_release(&arena.lock)
    return found


cdef Backing* backing_of(ArenaCore* arena, uint64_t address) noexcept nogil:
    # NULL: a region that is cut from pages.
    cdef Backing* apart = apart_from(arena, address)
    if apart != NULL:
        return apart
    return NULL if arena.settings.paged else &arena.backing


# ---- pages ---------------------------------------------------------------------------------------

cdef uint64_t trim_pages(ArenaCore* arena) noexcept nogil:
    cdef uint64_t before = arena_reserved(arena)
    cdef int i
    if not arena.settings.paged:
        return 0
    for i in range(SPACES):
        trim_space(arena, &arena.spaces[i], <uint32_t>-1, <uint64_t>-1)
    arena_reconcile(arena)
    return before - arena_reserved(arena)


cdef void give_up_views(ArenaCore* arena) noexcept nogil:
    cdef int i
    lock_acquire(&arena.lock)
    for i in range(SPACES):
        space_give_up_views(&arena.spaces[i])
    lock_release(&arena.lock)


cdef uint64_t trim_space(ArenaCore* arena, Space* space, uint32_t pages,
                         uint64_t nbytes) noexcept nogil:
    # Addresses stay. Pages that the driver refuses to unmap or to release stay too, for the next
    # try. Returns the bytes of the released pages.
    cdef Plan plan
    cdef CUresult code
    cdef bint any_idle
    cdef uint64_t before
    lock_acquire(&arena.lock)
    before = space.physical
    any_idle = space_plan_trim(space, &plan, pages, nbytes)
    lock_release(&arena.lock)
    if not any_idle:
        plan_free(&plan)
        return 0
    code = space_execute(space, &plan)
    lock_acquire(&arena.lock)
    plan_note(space, &plan)
    if code == CUDA_SUCCESS:
        space_finish(space, &plan, NULL, 0)
    else:
        space_undo(space, &plan)
    lock_release(&arena.lock)
    plan_free(&plan)
    # Memory that the driver refused to release earlier is tried again.
    if space.orphan_count and context_enter(arena.context) == CUDA_SUCCESS:
        orphans_release(space)
        context_leave(arena.context)
    return before - space.physical


cdef void release_in_other_range(ArenaCore* arena, const Space* space, Plan* plan,
                                 uint64_t peak) noexcept nogil:
    # Pages move within their range. Idle pages of the other range are released for the pages that
    # the plan makes above the share: otherwise idle memory of large blocks would stay beside memory
    # that small blocks need now, and vice versa. At most the share stays idle there: it will be
    # needed again, and to release and make it again would cost more than it saves.
    cdef int other = LARGE_SPACE if space == &arena.spaces[SMALL_SPACE] else SMALL_SPACE
    cdef const Bfc* table = &arena.table if other == LARGE_SPACE else &arena.small
    cdef uint64_t share = with_share(arena, peak) - peak
    cdef uint64_t begin, idle, released
    if space == &arena.spaces[PERSISTENT_SPACE]:
        return
    lock_acquire(&arena.lock)
    idle = table.reserved - table.in_use
    lock_release(&arena.lock)
    if idle < share + GRANULE:
        return
    begin = arena.context.now()
    released = trim_space(arena, &arena.spaces[other], <uint32_t>-1, plan.beyond_share)
    if released == 0:
        released = trim_space(arena, &arena.spaces[other], 1, idle - share)     # a larger page
    arena_reconcile(arena)
    plan.beyond_share -= min(released, plan.beyond_share)
    spend_time_since(arena, begin)


cdef void spend_time_since(ArenaCore* arena, uint64_t begin) noexcept nogil:
    lock_acquire(&arena.lock)
    budget_spend(&arena.move_budget, arena.context.now() - begin)
    lock_release(&arena.lock)


cdef void release_overdraft(ArenaCore* arena) noexcept nogil:
    # The time counts in the move budget, which is at least half full here: so a program that needs
    # the memory again soon does not spend more than its share of time on it.
    cdef uint64_t reserved, share, begin, released
    cdef bint has_time
    if arena.overdraft == 0:
        return
    lock_acquire(&arena.lock)
    reserved = arena_reserved(arena)
    share = with_share(arena, live_peak(arena))
    has_time = budget_rested(&arena.move_budget, move_clock(arena))
    lock_release(&arena.lock)
    # The live peak may have reached a part of it, and a shrink may have released another.
    arena.overdraft = min(arena.overdraft, reserved - min(reserved, share))
    if arena.overdraft < GRANULE or not has_time:
        return
    begin = arena.context.now()
    released = trim_space(arena, &arena.spaces[LARGE_SPACE], <uint32_t>-1, arena.overdraft)
    released += trim_space(arena, &arena.spaces[SMALL_SPACE], <uint32_t>-1,
                           arena.overdraft - released)
    arena.overdraft -= released
    arena_reconcile(arena)
    spend_time_since(arena, begin)


cdef bint persistent_release(ArenaCore* arena, uint64_t address) noexcept nogil:
    cdef Bfc* table = &arena.persistent
    cdef uint32_t index
    lock_acquire(&arena.lock)
    for index in range(table.count):
        if table.chunks[index].state == CHUNK_USED and table.chunks[index].address == address:
            bfc_free(table, index, SLOT_RELEASED, 0)
            break
    lock_release(&arena.lock)
    trim_space(arena, &arena.spaces[PERSISTENT_SPACE], <uint32_t>-1, <uint64_t>-1)
    return True

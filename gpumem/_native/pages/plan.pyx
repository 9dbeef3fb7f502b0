"""Plans: the place of a block, and the pages that supply it.

A plan changes the chunk table and the pages before any driver call. So each step that can fail for
lack of host memory or pages comes before the first change. A later failure (a plan that would pass
the hard limit, a driver call that is refused) undoes the whole plan: its claim first, then its
actions, the last one first; see `space_undo`.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memset

from gpumem._native.bfc cimport (
    bfc_free_around, Chunk, CHUNK_HOLE, CHUNK_USED, holes_allocate, NIL, SLOT_RELEASED,
    slots_ready, state_of,
)
from gpumem._native.pages.space cimport (
    fill_granules, granules_ready, has_retired, note_dormant, page_note, page_slot,
    pages_ready, retired_add, retired_ready, retired_remove, see_above, see_idle_pages,
    see_swappable, take_out, view_set,
)
from gpumem._native.pages.types cimport (
    Action, ACTION_CREATE, ACTION_DROP, ACTION_DROP_RETIRED, ACTION_MOVE, ACTION_RELEASE,
    ActionKind, address_of, BLOCK_PAGES, bytes_of, CLAIM_PAGES, Demand, end_of, GRANULE,
    GRANULE_BITS, granule_from, granule_of, has_active, is_backed, is_dormant_quiet, is_idle,
    is_movable, is_quiet, LIMIT_BITS, LIMITED_GRANULES, MAX_PAGE_GRANULES, may_use, overlaps,
    Page, page_mapped_at, page_over, PEAK_PAGES, Piece, Plan, PLAN_NO_MEMORY, PLAN_NO_METADATA,
    PLAN_NO_PLACE, PLAN_OK, PLANNED_SLOTS, PlanResult, RETIRED, RetiredView, Space,
)
from gpumem._support.atomics cimport load8, sum_add
from gpumem._support.events cimport REC_MOVE


# The cheapest place found so far.
cdef struct Site:
    uint32_t anchor             # chunk at or below `begin` that swapping pages leaves in place
    uint64_t begin
    uint32_t missing            # granules that need a mapping


cdef PlanResult space_plan(Space* space, const Demand* demand, Plan* plan) noexcept nogil:
    cdef Site site
    cdef uint64_t end, begin
    cdef uint32_t first_granule, last_granule, count
    memset(plan, 0, sizeof(Plan))
    plan.chunk = NIL
    see_idle_pages(space, demand.stream_slot)
    if not find_site(space, demand, &site):
        return PLAN_NO_PLACE
    begin = site.begin
    end = claimed_end(space, chunk_at(space, site.anchor, begin), begin + demand.claim)
    first_granule = granule_of(space, begin)
    last_granule = granule_from(space, end)
    count = last_granule - first_granule
    # All host memory is acquired before anything changes, so that a plan that begins can be
    # carried through.
    if (not granules_ready(space, last_granule) or not pages_ready(space, count)
            or not retired_ready(space, count)
            # Drop, release and create for each.
            or not actions_ready(plan, 3 * count + space.retired_count)
            or not slots_ready(space.table, PLANNED_SLOTS + 8 * count)):
        return PLAN_NO_METADATA
    if not supply_suffices(space, demand, site.missing, begin, end):
        return PLAN_NO_MEMORY
    # Swaps cost no driver call, so they come before pages are moved or made. They need no undoing:
    # both views of a swapped page stay mapped.
    swap_views(space, begin, end)
    if not note_pieces(space, plan, chunk_at(space, site.anchor, begin), end):
        return PLAN_NO_METADATA
    plan.chunk = holes_allocate(space.table, chunk_at(space, site.anchor, begin), begin, end,
                                demand.requested, demand.stream_slot)
    see_above(space, plan.chunk)
    drop_retired(space, plan)
    fill_missing(space, plan, begin, end, demand)
    return PLAN_OK


cdef uint32_t space_allocate_lower(Space* space, const Demand* demand,
                                   uint64_t below) noexcept nogil:
    cdef Site site
    cdef uint64_t end
    # Only a place that misses nothing and begins below is better. Most searches find none, mostly
    # because no run is long enough even if every page in it were idle. That is checked first,
    # because it takes longest to find the idle pages.
    site.begin = below
    site.missing = 0
    if not find_run(space, demand, True, &site) or (
            see_swappable(space, demand.stream_slot) >= below
            or not find_run(space, demand, False, &site)):
        return NIL
    end = site.begin + demand.size
    if not slots_ready(space.table, PLANNED_SLOTS
                       + 8 * (granule_from(space, end) - granule_of(space, site.begin))):
        return NIL
    swap_views(space, site.begin, end)
    return holes_allocate(space.table, chunk_at(space, site.anchor, site.begin), site.begin, end,
                          demand.requested, demand.stream_slot)


cdef bint space_restore(Space* space, uint64_t begin, uint64_t end) noexcept nogil:
    cdef uint32_t g = granule_of(space, begin)
    cdef uint32_t last = granule_from(space, end)
    cdef uint32_t index, first
    cdef Page* page
    if not (retired_ready(space, last - g)
            and slots_ready(space.table, PLANNED_SLOTS + 8 * (last - g))):
        return False
    while g < last:
        if is_backed(space, g):
            g += 1
            continue
        index = page_viewed_at(space, g, &first)
        if index == NIL:
            return False
        page = &space.page[index]
        page.chunk = bfc_free_around(space.table, address_of(space, page.active), bytes_of(page))
        if page.chunk == NIL:
            return False
        if first != page.dormant:
            exchange_retired(space, index, first)
        swap_page(space, page)
        g = page.active + page.granules
    return True


cdef uint32_t page_viewed_at(const Space* space, uint32_t granule, uint32_t* first) noexcept nogil:
    # Returns the page with an inactive view there, and the beginning of that view; NIL: none has.
    cdef uint32_t index = page_mapped_at(space, granule)
    cdef const RetiredView* view
    cdef uint32_t i
    if index == NIL or index != RETIRED:
        first[0] = NIL if index == NIL else space.page[index].dormant
        return index
    for i in range(space.retired_count):
        view = &space.retired[i]
        if view.first <= granule < view.first + space.page[view.page].granules:
            first[0] = view.first
            return view.page
    return NIL


cdef void exchange_retired(Space* space, uint32_t index, uint32_t first) noexcept nogil:
    # Exchanges a retired view of a page with its dormant one.
    cdef Page* page = &space.page[index]
    cdef uint32_t dormant = page.dormant
    cdef uint32_t i = 0
    while space.retired[i].page != index or space.retired[i].first != first:
        i += 1
    retired_remove(space, i)
    if dormant != NIL:
        retired_add(space, index, dormant, page.dormant_stream_slot, page.dormant_epoch)
    page.dormant = first
    view_set(space, first, page.granules, index)


cdef uint64_t claimed_end(const Space* space, uint32_t index, uint64_t end) noexcept nogil:
    # A block that ends in a hole takes the whole granule until its pages are mapped.
    while end_of(&space.table.chunks[index]) < end:
        index = space.table.chunks[index].next
    if state_of(space.table, index) == CHUNK_HOLE:
        return address_of(space, granule_from(space, end))
    return end


cdef bint supply_suffices(const Space* space, const Demand* demand, uint32_t missing,
                          uint64_t begin, uint64_t end) noexcept nogil:
    # Whether the missing granules have room below the hard limit, or enough idle pages.
    cdef uint64_t room = 0
    cdef uint32_t i
    cdef const Page* page
    if demand.hard_limit > demand.reserved:
        room = (demand.hard_limit - demand.reserved) >> GRANULE_BITS
    if room >= missing:
        return True
    for i in range(space.idle_count):
        page = &space.page[space.idle[i]]
        if is_movable(space, page, begin, end):
            room += page.granules
    return room >= missing


cdef bint note_pieces(const Space* space, Plan* plan, uint32_t first, uint64_t end) noexcept nogil:
    # Notes the marks of work that may still use the window, for waits and for an undo.
    cdef uint32_t index = first
    cdef uint32_t count = 0
    cdef const Chunk* chunk
    while index != NIL and space.table.chunks[index].address < end:
        count += 1
        index = space.table.chunks[index].next
    plan.pieces = <Piece*>calloc(count + 1, sizeof(Piece))
    if plan.pieces == NULL:
        return False
    index = first
    while index != NIL and space.table.chunks[index].address < end:
        chunk = &space.table.chunks[index]
        if chunk.stream_slot != SLOT_RELEASED:
            plan.pieces[plan.piece_count] = Piece(chunk.address, end_of(chunk), chunk.epoch,
                                                  chunk.stream_slot)
            plan.piece_count += 1
        index = chunk.next
    return True


# A swap makes the dormant view of an idle page the active one, and its old place a hole. Swaps go
# downward, as pages mostly lie in their old place, too: the remainder of that then keeps its index.
cdef void swap_views(Space* space, uint64_t begin, uint64_t end) noexcept nogil:
    cdef uint32_t first = granule_of(space, begin)
    cdef uint32_t g = granule_from(space, end)
    cdef Page* page
    while g > first:
        g -= 1
        page = page_over(space, g)
        if page == NULL:
            continue
        # Its active view lies outside, so the one here is dormant.
        if can_swap(space, page, begin, end):
            swap_page(space, page)
        # Continue below the page's view that the granule lies in.
        g = page.active if has_active(page, g) else page.dormant


cdef void swap_page(Space* space, Page* page) noexcept nogil:
    cdef uint32_t target = page.dormant
    cdef uint32_t stream_slot
    cdef uint64_t epoch
    take_out(space, page, &stream_slot, &epoch)
    page.dormant = page.active
    page.dormant_stream_slot = stream_slot
    page.dormant_epoch = epoch
    page.active = target
    note_dormant(space, page)
    fill_granules(space, target, page.granules, stream_slot, epoch)
    page.seen_idle = 0
    space.swapped += 1
    page_note(space, page, REC_MOVE, target, page.dormant)


cdef void fill_missing(Space* space, Plan* plan, uint64_t begin, uint64_t end,
                       const Demand* demand) noexcept nogil:
    # Finds runs of granules in the claimed block without an active page, and supplies them.
    cdef uint32_t g = granule_of(space, begin)
    cdef uint32_t last = granule_from(space, end)
    cdef uint32_t run, mapped
    cdef const Page* page
    cdef Demand left = demand[0]        # its reserved bytes run along with the plan
    forget_idle_inside(space, begin, end)
    while g < last:
        page = page_over(space, g)
        if page != NULL and has_active(page, g):
            g = page.active + page.granules
            continue
        run = g
        while run < last and not is_backed(space, run):
            mapped = page_mapped_at(space, run)
            if mapped != NIL:
                # The dormant view there is quiet, and makes room.
                unmap_dormant(space, action_add(plan, ACTION_DROP, mapped), &space.page[mapped])
            run += 1
        while g < run:
            g += supply(space, plan, g, run - g, begin, end, &left)


cdef void forget_idle_inside(Space* space, uint64_t begin, uint64_t end) noexcept nogil:
    # Pages in the window belong to the block, and supply nothing.
    cdef uint32_t i
    cdef Page* page
    for i in range(space.idle_count):
        page = &space.page[space.idle[i]]
        if overlaps(space, page, begin, end):
            page.seen_idle = 0


cdef void drop_retired(Space* space, Plan* plan) noexcept nogil:
    # Unmaps all retired views that are quiet. The place of this plan covers none of them.
    cdef const RetiredView* view
    cdef uint32_t i = space.retired_count
    while i > 0:
        i -= 1
        view = &space.retired[i]
        if is_quiet(space, view.stream_slot, view.epoch):
            action_add(plan, ACTION_DROP_RETIRED, view.page).unmap[0] = view.first
            retired_remove(space, i)


cdef void unmap_dormant(Space* space, Action* action, Page* page) noexcept nogil:
    action.unmap[0] = page.dormant
    if page.dormant != NIL:
        view_set(space, page.dormant, page.granules, NIL)
    page.dormant = NIL


# Supplies granules at `at`, at most `wanted`; returns their number. The order is the policy.
cdef uint32_t supply(Space* space, Plan* plan, uint32_t at, uint32_t wanted, uint64_t begin,
                     uint64_t end, Demand* demand) noexcept nogil:
    cdef uint32_t granules = largest_power_of_two(wanted, page_granules(space, demand))
    cdef uint32_t chosen
    # 1. New memory, as long as the arena holds little more than its live peak.
    if demand.reserved + (<uint64_t>granules << GRANULE_BITS) <= demand.share_limit:
        return plan_create(space, plan, at, granules, demand)
    # 2. New memory somewhat above that, the further the time for moves is overdrawn.
    if demand.reserved + (<uint64_t>granules << GRANULE_BITS) <= demand.spare_limit:
        sum_add(&space.spared, 1)
        plan.spares = True
        return plan_create(space, plan, at, granules, demand)
    # 3. Move an idle page here: driver calls, but no more memory.
    chosen = longest_idle(space, plan, wanted, begin, end)
    if chosen != NIL:
        return plan_move(space, plan, chosen, at)
    # 4. A smaller new page, if that stays within the share.
    while granules > 1:
        granules >>= 1
        if demand.reserved + (<uint64_t>granules << GRANULE_BITS) <= demand.share_limit:
            return plan_create(space, plan, at, granules, demand)
    # 5. Every idle page is larger than the gap: release the smallest, and make one granule.
    # 6. None can be released: make one granule above the share, as free memory lies in parts of
    # larger pages.
    chosen = smallest_releasable(space, begin, end)
    if chosen != NIL:
        plan_release(space, plan, chosen, demand)
    if demand.reserved + GRANULE > demand.hard_limit:
        # Idle pages are larger than the gap and still have queued work, so none can be released.
        plan.over_limit = True
    return plan_create(space, plan, at, 1, demand)


cdef uint32_t page_granules(const Space* space, const Demand* demand) noexcept nogil:
    # Returns the maximum of granules that still divide the live peak into PEAK_PAGES pages, which
    # keeps rounding small, or a block that is a large part of it into CLAIM_PAGES. A large block
    # gets no larger pages: after its free they have to fit into the places of smaller blocks. Pages
    # of the largest size are for blocks of many such pages: free memory between smaller blocks is
    # often less than such a page, which then can neither hold a block nor move. Below a limit
    # that would end in a refusal, so every block there consists of many pages.
    cdef bint limited = demand.hard_limit >> LIMIT_BITS == 0
    cdef uint64_t least = LIMITED_GRANULES if limited else MAX_PAGE_GRANULES // 2
    cdef uint64_t limit = min(<uint64_t>MAX_PAGE_GRANULES, max(
        least, demand.claim // BLOCK_PAGES >> GRANULE_BITS))
    cdef uint64_t bytes = max(demand.live_peak // PEAK_PAGES, demand.claim // CLAIM_PAGES)
    cdef uint32_t granules = 1
    if not space.large:
        return 1
    while granules * 2 <= limit and <uint64_t>granules << (GRANULE_BITS + 1) <= bytes:
        granules <<= 1
    return granules


cdef inline uint32_t largest_power_of_two(uint32_t wanted, uint32_t limit) noexcept nogil:
    cdef uint32_t granules = 1
    while granules * 2 <= wanted and granules * 2 <= limit:
        granules *= 2
    return granules


cdef uint32_t longest_idle(const Space* space, Plan* plan, uint32_t wanted, uint64_t begin,
                           uint64_t end) noexcept nogil:
    # Returns the largest of the movable pages that fit; of those, the longest idle. During a plan
    # pages only cease to be movable, and most became idle together. So the search continues after
    # the last one for the next of the same kind, and begins anew only if there is none.
    cdef uint32_t best = NIL
    cdef uint32_t i
    cdef const Page* page
    if plan.next_granules <= wanted <= plan.next_wanted:
        for i in range(plan.next_idle, space.idle_count):
            page = &space.page[space.idle[i]]
            if (page.granules == plan.next_granules and page.idle_since == plan.next_since
                    and is_movable(space, page, begin, end)):
                plan.next_idle = i + 1
                return space.idle[i]
    plan.next_wanted = 0
    for i in range(space.idle_count):
        page = &space.page[space.idle[i]]
        if page.granules > wanted or not is_movable(space, page, begin, end):
            continue
        if (best == NIL or page.granules > space.page[best].granules
                or (page.granules == space.page[best].granules
                    and page.idle_since < space.page[best].idle_since)):
            best = space.idle[i]
            plan.next_idle = i + 1
    if best != NIL:
        plan.next_wanted = wanted
        plan.next_granules = space.page[best].granules
        plan.next_since = space.page[best].idle_since
    return best


cdef uint32_t smallest_releasable(const Space* space, uint64_t begin,
                                  uint64_t end) noexcept nogil:
    # A page is released only when no work is queued through it: unmapping does not wait.
    cdef uint32_t best = NIL
    cdef uint32_t i
    cdef const Page* page
    for i in range(space.idle_count):
        page = &space.page[space.idle[i]]
        if (is_releasable(space, space.idle[i], begin, end)
                and is_quiet(space, space.table.chunks[page.chunk].stream_slot,
                             space.table.chunks[page.chunk].epoch)
                and (best == NIL or page.granules < space.page[best].granules)):
            best = space.idle[i]
    return best


cdef bint is_releasable(const Space* space, uint32_t index, uint64_t begin,
                        uint64_t end) noexcept nogil:
    # Whether a page is idle, outside of [begin, end), without queued work through views other than
    # the active one, and without a graph that uses that.
    cdef const Page* page = &space.page[index]
    return (not space.keeps_views and is_movable(space, page, begin, end)
            and is_dormant_quiet(space, page) and not has_retired(space, index))


cdef uint32_t plan_create(Space* space, Plan* plan, uint32_t at, uint32_t granules,
                          Demand* demand) noexcept nogil:
    cdef uint32_t index = page_slot(space)
    cdef Page* page = &space.page[index]
    cdef Action* action = action_add(plan, ACTION_CREATE, index)
    memset(page, 0, sizeof(Page))
    plan.creates += 1
    page.granules = granules
    page.active = at
    page.dormant = NIL
    page.busy = True
    action.to = at
    view_set(space, at, granules, index)
    space.physical += bytes_of(page)
    demand.reserved += bytes_of(page)
    if demand.reserved > demand.share_limit:
        plan.beyond_share += min(bytes_of(page), demand.reserved - demand.share_limit)
    return granules


cdef uint32_t plan_move(Space* space, Plan* plan, uint32_t index, uint32_t at) noexcept nogil:
    cdef Page* page = &space.page[index]
    cdef Action* action = action_add(plan, ACTION_MOVE, index)
    plan.moves += 1
    action.to = at
    action.origin = page.active
    if is_dormant_quiet(space, page):
        unmap_dormant(space, action, page)
    else:
        retired_add(space, index, page.dormant, page.dormant_stream_slot, page.dormant_epoch)
    # The old view stays mapped. Work that was queued before may still use it, and the same place is
    # often wanted again: a swap then saves the map and the unmap.
    take_out(space, page, &action.stream_slot, &action.epoch)
    page.dormant = page.active
    page.dormant_stream_slot = action.stream_slot
    page.dormant_epoch = action.epoch
    # All of the above reads the old place.
    page.active = at
    page.busy = True
    note_dormant(space, page)
    view_set(space, at, page.granules, index)
    return page.granules


cdef void plan_release(Space* space, Plan* plan, uint32_t index, Demand* demand) noexcept nogil:
    cdef Page* page = &space.page[index]
    cdef Action* action = action_add(plan, ACTION_RELEASE, index)
    plan.moves += 1         # together with the new page it costs as much as a move
    action.origin = page.active
    action.unmap[1] = page.active
    unmap_dormant(space, action, page)
    take_out(space, page, &action.stream_slot, &action.epoch)
    view_set(space, page.active, page.granules, NIL)
    page.active = NIL
    space.physical -= bytes_of(page)
    demand.reserved -= bytes_of(page)


# An idle page, and the number of the plan that first saw it idle.
cdef struct AgedPage:
    uint64_t since
    uint32_t index


cdef int by_age(const void* a, const void* b) noexcept nogil:
    cdef uint64_t first = (<const AgedPage*>a).since
    cdef uint64_t second = (<const AgedPage*>b).since
    return (first > second) - (first < second)


cdef bint space_plan_trim(Space* space, Plan* plan, uint32_t pages,
                          uint64_t nbytes) noexcept nogil:
    # SLOT_RELEASED: idle for every stream, since no stream's order protects an unmapped page.
    cdef Demand demand
    cdef AgedPage* aged
    cdef Page* page
    cdef uint32_t i
    memset(plan, 0, sizeof(Plan))
    memset(&demand, 0, sizeof(Demand))
    plan.chunk = NIL
    see_idle_pages(space, SLOT_RELEASED)
    aged = <AgedPage*>malloc((space.idle_count + 1) * sizeof(AgedPage))
    if (aged == NULL or not actions_ready(plan, space.idle_count + space.retired_count)
            or not slots_ready(space.table, 2 * space.idle_count)):
        free(aged)
        return False
    drop_retired(space, plan)
    for i in range(space.idle_count):
        aged[i] = AgedPage(space.page[space.idle[i]].idle_since, space.idle[i])
    if nbytes != <uint64_t>-1:      # a trim of all pages needs no order
        qsort(aged, space.idle_count, sizeof(AgedPage), by_age)
    for i in range(space.idle_count):
        page = &space.page[aged[i].index]
        if (plan.moves < pages and bytes_of(page) <= nbytes
                and is_releasable(space, aged[i].index, 0, 0)):
            nbytes -= bytes_of(page)
            plan_release(space, plan, aged[i].index, &demand)
    free(aged)
    return plan.count != 0


cdef bint actions_ready(Plan* plan, uint32_t count) noexcept nogil:
    # Mostly a few of hundreds are used: each is cleared when it is used.
    plan.actions = <Action*>malloc((count + 1) * sizeof(Action))
    return plan.actions != NULL


cdef Action* action_add(Plan* plan, ActionKind kind, uint32_t page) noexcept nogil:
    cdef Action* action = &plan.actions[plan.count]
    plan.count += 1
    memset(action, 0, sizeof(Action))
    action.kind = kind
    action.page = page
    action.to = action.origin = action.unmap[0] = action.unmap[1] = NIL
    return action


cdef void plan_free(Plan* plan) noexcept nogil:
    free(plan.actions)
    free(plan.pieces)
    memset(plan, 0, sizeof(Plan))
    plan.chunk = NIL


# ---- Finding the cheapest place for a block ------------------------------------------------------


cdef enum:
    IMPOSSIBLE = 0x7FFFFFFF

# A gap: a run of free chunks and holes between used ones that the block's stream may take.
cdef struct Gap:
    uint32_t first              # chunk
    uint64_t begin
    uint64_t end
    bint open                   # reaches the end of the address space


cdef bint find_site(Space* space, const Demand* demand, Site* best) noexcept nogil:
    # No free chunk holds the block, so its place touches a hole: walk the gaps around the holes.
    cdef uint32_t hole = space.table.holes
    cdef Gap gap
    best.missing = IMPOSSIBLE
    while hole != NIL:
        if gap_from_first_hole(space, hole, demand, &gap):
            try_gap(space, &gap, demand, best)
        hole = space.table.chunks[hole].bin_next
    return best.missing != IMPOSSIBLE


cdef bint find_run(Space* space, const Demand* demand, bint any_page, Site* best) noexcept nogil:
    # Finds the lowest run: free chunks and views of idle pages side by side. With `any_page` all
    # pages count, which shows whether there is a run at all; `best` is then unchanged.
    cdef uint32_t hole = space.table.holes
    cdef uint64_t below = best.begin
    cdef Gap gap
    while hole != NIL:
        if (space.table.chunks[hole].address < best.begin
                and gap_from_first_hole(space, hole, demand, &gap)
                and try_runs(space, &gap, demand, any_page, best) and any_page):
            return True
        hole = space.table.chunks[hole].bin_next
    return best.begin != below


cdef bint try_runs(Space* space, const Gap* gap, const Demand* demand, bint any_page,
                   Site* best) noexcept nogil:
    # Only the first run that holds the block: each further one begins higher.
    cdef uint32_t index = gap.first
    cdef uint64_t begin = gap.begin
    cdef uint64_t end = begin
    cdef const Chunk* chunk
    while end < gap.end and begin < best.begin:
        chunk = &space.table.chunks[index]
        end = end_of(chunk)
        if load8(&chunk.state) == CHUNK_HOLE:
            end = run_through(space, chunk, demand.claim, any_page, best.begin, &begin)
        if end >= begin + demand.claim:
            if not any_page:
                try_site(space, gap, begin, demand, best)
            return True
        index = chunk.next
    return False


cdef uint64_t run_through(const Space* space, const Chunk* hole, uint64_t size, bint any_page,
                          uint64_t below, uint64_t* begin) noexcept nogil:
    # Follows a run, which begins in the hole or below it: to its end if it has `size` bytes; else
    # to the end of the hole, where the run that reaches it may have begun in the hole. A run that
    # can only begin at `below` or higher ends where it begins.
    cdef uint32_t first = granule_of(space, hole.address)
    cdef uint32_t last = min(granule_of(space, end_of(hole)), space.granules)
    cdef uint32_t g = first
    cdef const Page* page
    while g < last and begin[0] < below:
        page = page_over(space, g)
        if page != NULL and (any_page or is_idle(space, page)):
            g = page.dormant + page.granules    # in a hole every other view is a dormant one
            continue
        if granule_in(hole, first, g) >= begin[0] + size:
            return granule_in(hole, first, g)
        g = g + 1 if page == NULL else page.dormant + page.granules
        while g < last and space.page_at[g] == NIL:
            g += 1      # addresses without a page, of which a hole may have thousands
        begin[0] = granule_in(hole, first, g)
    if end_of(hole) != granule_in(hole, first, g) < begin[0] + size:
        begin[0] = end_of(hole)     # nothing was ever mapped above it
        return begin[0]
    return granule_in(hole, first, g)


cdef inline uint64_t granule_in(const Chunk* hole, uint32_t first, uint32_t granule) noexcept nogil:
    # Returns the address of a granule of a hole, which begins with the granule `first`.
    return hole.address + (<uint64_t>(granule - first) << GRANULE_BITS)


cdef inline bint in_gap(const Space* space, uint32_t index, uint32_t stream_slot) noexcept nogil:
    cdef const Chunk* chunk = &space.table.chunks[index]
    return load8(&chunk.state) == CHUNK_HOLE or may_use(space, chunk, stream_slot)


cdef bint gap_from_first_hole(const Space* space, uint32_t hole, const Demand* demand,
                              Gap* gap) noexcept nogil:
    # Finds the gap around a hole; False if it is too small, or if an earlier hole lies in the same
    # gap, which is tried for the earlier one.
    cdef uint32_t index = hole
    cdef uint32_t prev = space.table.chunks[index].prev
    while prev != NIL and in_gap(space, prev, demand.stream_slot):
        if state_of(space.table, prev) == CHUNK_HOLE:
            return False
        index = prev
        prev = space.table.chunks[index].prev
    gap.first = index
    gap.begin = space.table.chunks[index].address
    index = hole        # all chunks from the first to the hole are in the gap
    while space.table.chunks[index].next != NIL and in_gap(
            space, space.table.chunks[index].next, demand.stream_slot):
        index = space.table.chunks[index].next
    gap.end = end_of(&space.table.chunks[index])
    gap.open = space.table.chunks[index].next == NIL
    return gap.end - gap.begin >= demand.claim


cdef void try_gap(Space* space, const Gap* gap, const Demand* demand, Site* best) noexcept nogil:
    # Tries both ends of the gap, both ends of each free chunk in it, and the place after each view
    # that work still uses; for a block that is built anew also after other views and free chunks.
    cdef uint32_t index = gap.first
    cdef const Chunk* chunk
    try_site(space, gap, gap.begin, demand, best)
    if not gap.open:
        try_site(space, gap, gap.end - demand.claim, demand, best)
    while index != NIL and space.table.chunks[index].address < gap.end:
        chunk = &space.table.chunks[index]
        if load8(&chunk.state) != CHUNK_HOLE:
            try_site(space, gap, chunk.address, demand, best)
            if end_of(chunk) - gap.begin >= demand.claim:
                try_site(space, gap, end_of(chunk) - demand.claim, demand, best)
        else:
            if demand.anew:
                try_site(space, gap, chunk.address, demand, best)
            try_after_views(space, gap, chunk, demand, best)
        index = chunk.next


cdef void try_after_views(Space* space, const Gap* gap, const Chunk* hole, const Demand* demand,
                          Site* best) noexcept nogil:
    # A place may not cover a view with queued work, but it may begin where one ends.
    cdef uint32_t g = granule_of(space, hole.address)
    cdef uint32_t last = min(granule_of(space, end_of(hole)), space.granules)
    cdef uint32_t mapped
    cdef const Page* page
    cdef bint quiet
    while g < last:
        page = page_over(space, g)
        if page != NULL:
            g = page.dormant + page.granules    # in a hole every other view is a dormant one
            quiet = is_quiet(space, page.dormant_stream_slot, page.dormant_epoch)
        else:
            mapped = space.page_at[g]           # NIL or RETIRED
            quiet = mapped == NIL
            while g < last and space.page_at[g] == mapped:
                g += 1
        if (demand.anew or not quiet) and address_of(space, g) + demand.claim <= gap.end:
            try_site(space, gap, address_of(space, g), demand, best)


cdef void try_site(Space* space, const Gap* gap, uint64_t begin, const Demand* demand,
                   Site* best) noexcept nogil:
    cdef uint32_t index = gap.first
    cdef uint32_t missing = 0
    cdef uint32_t granules
    cdef uint64_t end
    cdef const Chunk* chunk
    while end_of(&space.table.chunks[index]) <= begin:
        index = space.table.chunks[index].next
    if state_of(space.table, index) == CHUNK_HOLE:
        # A block that begins in a hole begins with a granule.
        begin = address_of(space, granule_of(space, begin))
    end = begin + demand.claim
    if end > gap.end or (best.missing == 0 and begin >= best.begin):
        return
    while True:
        chunk = &space.table.chunks[index]
        if load8(&chunk.state) == CHUNK_HOLE:
            granules = missing_in_hole(space, chunk, begin, end)
            missing += granules
            if granules == IMPOSSIBLE or missing > best.missing:
                return          # further holes only add to it
        if end_of(chunk) >= end:
            break
        index = chunk.next
    if demand.anew and missing < granule_from(space, end) - granule_of(space, begin):
        return                      # a page lies there, or would by a swap
    # Of places that miss equally many granules the lowest, so that the space stays dense.
    if missing < best.missing or (missing == best.missing and begin < best.begin):
        best.anchor = anchor_below(space, gap.first)
        best.begin = begin
        best.missing = missing


cdef uint32_t anchor_below(const Space* space, uint32_t index) noexcept nogil:
    # A used chunk keeps its index while chunks merge around it; so does the first of the region.
    while space.table.chunks[index].prev != NIL:
        index = space.table.chunks[index].prev
        if state_of(space.table, index) == CHUNK_USED:
            break
    return index


cdef uint32_t chunk_at(const Space* space, uint32_t anchor, uint64_t address) noexcept nogil:
    while end_of(&space.table.chunks[anchor]) <= address:
        anchor = space.table.chunks[anchor].next
    return anchor


cdef uint32_t missing_in_hole(const Space* space, const Chunk* hole, uint64_t begin,
                              uint64_t end) noexcept nogil:
    # Returns the granules of a hole inside [begin, end) that no idle page's dormant view can fill;
    # IMPOSSIBLE if work is still queued through a view there, which an unmap would not wait for.
    cdef uint32_t g = granule_of(space, max(begin, hole.address))
    cdef uint32_t last = granule_from(space, min(end, end_of(hole)))
    cdef uint32_t missing = 0
    cdef const Page* page
    while g < last:
        page = page_over(space, g)
        if page != NULL and can_swap(space, page, begin, end):
            g = page.dormant + page.granules
            continue
        if page_mapped_at(space, g) == RETIRED or page != NULL and not is_quiet(
                space, page.dormant_stream_slot, page.dormant_epoch):
            return IMPOSSIBLE
        missing += 1
        g += 1
    return missing


cdef bint can_swap(const Space* space, const Page* page, uint64_t begin,
                   uint64_t end) noexcept nogil:
    # Whether a page is idle, and not itself in the place that is being built.
    return is_idle(space, page) and not overlaps(space, page, begin, end)

"""Planning where pages go, and doing it; see _pages.pxd for the model."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from gpumem._bfc cimport (
    BFC_OK,
    Bfc,
    CHUNK_FREE,
    CHUNK_HOLE,
    CHUNK_USED,
    Chunk,
    LANE_RELEASED,
    LEVELS,
    Lane,
    NIL,
    STEPS,
    bfc_remove_region,
    bin_of,
)
from gpumem._bfc_holes cimport (
    holes_add_range,
    holes_carve,
    holes_claim,
    holes_fill,
    holes_prepare,
    holes_trim,
    holes_unclaim,
)
from gpumem._driver cimport CUDA_SUCCESS, CUresult, Place, place_enter, place_leave
from gpumem._page_driver cimport (
    page_create,
    page_map,
    page_release,
    page_unmap,
    address_free,
    address_reserve,
)

cdef enum:
    IMPOSSIBLE = 0x7FFFFFFF


# ---- addresses and granules ----------------------------------------------------------------------

cdef inline uint32_t granule_of(const Space* space, uint64_t address) noexcept nogil:
    return <uint32_t>((address - space.base) >> GRANULE_BITS)


cdef inline uint64_t address_of(const Space* space, uint32_t granule) noexcept nogil:
    return space.base + (<uint64_t>granule << GRANULE_BITS)


cdef inline uint32_t page_mapped_at(const Space* space, uint32_t granule) noexcept nogil:
    return space.page_at[granule] if granule < space.granules else NIL


cdef inline uint64_t end_of(const Chunk* chunk) noexcept nogil:
    return chunk.address + chunk.size


cdef void view_set(Space* space, uint32_t first, uint32_t granules, uint32_t page) noexcept nogil:
    cdef uint32_t g
    for g in range(first, first + granules):
        space.page_at[g] = page


# ---- which pages are idle ------------------------------------------------------------------------

cdef inline bint may_take(const Space* space, const Chunk* chunk, uint32_t lane) noexcept nogil:
    # Free for work of `lane` now, without asking anybody?
    return chunk.state == CHUNK_FREE and (
        chunk.lane == lane or chunk.lane == LANE_RELEASED
        or chunk.epoch <= space.table.lanes[chunk.lane].settled)


cdef inline bint is_idle(const Space* space, const Page* page) noexcept nogil:
    return page.seen_idle == space.plans


cdef inline bint is_quiet(const Space* space, uint32_t lane, uint64_t epoch) noexcept nogil:
    # Has everything finished that was queued under this mark?
    return lane == LANE_RELEASED or epoch <= space.table.lanes[lane].settled


cdef void see_idle_pages(Space* space, uint32_t lane) noexcept nogil:
    # Marks every page that lies inside a free chunk which `lane` may take.
    cdef uint32_t i
    cdef Page* page
    space.plans += 1
    for i in range(space.table.lane_count):
        see_lane(space, space.table.lanes[i], lane)
    for i in range(space.page_count):
        page = &space.page[i]
        page.busy = not is_idle(space, page)


cdef void see_lane(Space* space, const Lane* bins, uint32_t lane) noexcept nogil:
    cdef uint32_t level, step, first_level, first_step, index
    if bins.levels == 0:
        return
    bin_of(GRANULE, &first_level, &first_step)
    for level in range(first_level, LEVELS):
        if bins.steps[level] == 0:
            continue
        for step in range(STEPS):
            index = bins.head[level][step]
            while index != NIL:
                if may_take(space, &space.table.chunks[index], lane):
                    see_chunk(space, index)
                index = space.table.chunks[index].bin_next


cdef void see_chunk(Space* space, uint32_t index) noexcept nogil:
    # Every page wholly inside this free chunk is idle.
    cdef const Chunk* chunk = &space.table.chunks[index]
    cdef uint32_t g = granule_of(space, chunk.address + GRANULE - 1)
    cdef uint32_t last = granule_of(space, end_of(chunk))       # first granule not wholly inside
    cdef uint32_t mapped
    cdef Page* page
    while g < last:
        mapped = page_mapped_at(space, g)
        if mapped == NIL:
            g += 1
            continue
        page = &space.page[mapped]
        if page.active == g and g + page.granules <= last:
            if page.busy:
                page.idle_since = space.plans
                page.busy = False
            page.seen_idle = space.plans
            page.chunk = index
        g = page.active + page.granules if page.active <= g else g + 1


# ---- where the block goes ------------------------------------------------------------------------

# A gap: a run of free chunks and holes that `lane` may take, between used ones.
cdef struct Gap:
    uint32_t first              # chunk
    uint64_t begin
    uint64_t end
    bint open                   # reaches the end of the address space

# The cheapest place found so far.
cdef struct Site:
    uint32_t anchor             # chunk at or below `begin` that swapping pages leaves in place
    uint64_t begin
    uint32_t missing            # granules that need a mapping


cdef bint find_site(Space* space, const Demand* demand, Site* best) noexcept nogil:
    # No free chunk holds the block, so its place touches a hole: walk the gaps around the holes.
    cdef uint32_t hole = space.table.holes
    cdef Gap gap
    best.missing = IMPOSSIBLE
    while hole != NIL:
        if gap_from_first_hole(space, hole, demand.lane, &gap):
            if gap.end - gap.begin >= demand.size:
                try_gap(space, &gap, demand, best)
        hole = space.table.chunks[hole].bin_next
    return best.missing != IMPOSSIBLE


cdef inline bint in_gap(const Space* space, uint32_t index, uint32_t lane) noexcept nogil:
    cdef const Chunk* chunk = &space.table.chunks[index]
    return chunk.state == CHUNK_HOLE or may_take(space, chunk, lane)


cdef bint gap_from_first_hole(const Space* space, uint32_t hole, uint32_t lane,
                              Gap* gap) noexcept nogil:
    # The gap around a hole; False if an earlier hole of the same gap will tell of it.
    cdef uint32_t index = hole
    cdef uint32_t prev = space.table.chunks[index].prev
    while prev != NIL and in_gap(space, prev, lane):
        if space.table.chunks[prev].state == CHUNK_HOLE:
            return False
        index = prev
        prev = space.table.chunks[index].prev
    gap.first = index
    gap.begin = space.table.chunks[index].address
    while space.table.chunks[index].next != NIL and in_gap(
            space, space.table.chunks[index].next, lane):
        index = space.table.chunks[index].next
    gap.end = end_of(&space.table.chunks[index])
    gap.open = space.table.chunks[index].next == NIL
    return True


cdef void try_gap(Space* space, const Gap* gap, const Demand* demand, Site* best) noexcept nogil:
    # Places worth a look: either end of the gap, either end of each free chunk in it.
    cdef uint32_t index = gap.first
    cdef const Chunk* chunk
    try_site(space, gap, gap.begin, demand, best)
    if not gap.open:
        try_site(space, gap, gap.end - demand.size, demand, best)
    while index != NIL and space.table.chunks[index].address < gap.end:
        chunk = &space.table.chunks[index]
        if chunk.state != CHUNK_HOLE:
            try_site(space, gap, chunk.address, demand, best)
            if end_of(chunk) - gap.begin >= demand.size:
                try_site(space, gap, end_of(chunk) - demand.size, demand, best)
        index = chunk.next


cdef void try_site(Space* space, const Gap* gap, uint64_t begin, const Demand* demand,
                   Site* best) noexcept nogil:
    cdef uint32_t index = gap.first
    cdef uint32_t missing = 0
    cdef uint64_t end
    cdef const Chunk* chunk
    while end_of(&space.table.chunks[index]) <= begin:
        index = space.table.chunks[index].next
    if space.table.chunks[index].state == CHUNK_HOLE:
        # A block that begins in a hole begins with a granule.
        begin = address_of(space, granule_of(space, begin))
    end = begin + demand.size
    if end > gap.end:
        return
    while True:
        chunk = &space.table.chunks[index]
        if chunk.state == CHUNK_HOLE:
            missing += missing_in_hole(space, chunk, begin, end)
            if missing > best.missing:
                return
        if end_of(chunk) >= end:
            break
        index = chunk.next
    if missing < best.missing or (missing == best.missing and begin < best.begin):
        best.anchor = anchor_below(space, gap.first)
        best.begin = begin
        best.missing = missing


cdef uint32_t anchor_below(const Space* space, uint32_t index) noexcept nogil:
    # A used chunk keeps its number whatever merges around it; so does the first of the region.
    while space.table.chunks[index].prev != NIL:
        index = space.table.chunks[index].prev
        if space.table.chunks[index].state == CHUNK_USED:
            break
    return index


cdef uint32_t chunk_at(const Space* space, uint32_t anchor, uint64_t address) noexcept nogil:
    while end_of(&space.table.chunks[anchor]) <= address:
        anchor = space.table.chunks[anchor].next
    return anchor


cdef uint32_t missing_in_hole(const Space* space, const Chunk* hole, uint64_t begin,
                              uint64_t end) noexcept nogil:
    # Granules of a hole inside [begin, end) that no idle page's dormant view can fill.
    cdef uint64_t low = begin if begin > hole.address else hole.address
    cdef uint64_t high = end if end < end_of(hole) else end_of(hole)
    cdef uint32_t g = granule_of(space, low)
    cdef uint32_t last = granule_of(space, high + GRANULE - 1)
    cdef uint32_t missing = 0
    cdef uint32_t mapped
    cdef const Page* page
    while g < last:
        mapped = page_mapped_at(space, g)
        if mapped == NIL:
            missing += last - g if g >= space.granules else 1
            g = last if g >= space.granules else g + 1
            continue
        page = &space.page[mapped]
        if can_swap(space, page, begin, end):
            g = page.dormant + page.granules
        elif not is_quiet(space, page.dormant_lane, page.dormant_epoch):
            return IMPOSSIBLE // 2
        else:
            missing += 1
            g += 1
    return missing


cdef inline bint can_swap(const Space* space, const Page* page, uint64_t begin,
                          uint64_t end) noexcept nogil:
    # Idle, and not itself part of the place that is being built?
    return is_idle(space, page) and not overlaps(space, page, begin, end)


cdef inline bint overlaps(const Space* space, const Page* page, uint64_t begin,
                          uint64_t end) noexcept nogil:
    return (address_of(space, page.active) < end
            and address_of(space, page.active + page.granules) > begin)


# ---- the plan ------------------------------------------------------------------------------------

cdef bint space_plan(Space* space, const Demand* demand, Plan* plan) noexcept nogil:
    # With both locks. On True the books hold the claimed block and the pages' new places.
    cdef Site site
    cdef uint64_t end, begin
    cdef uint32_t first_granule, last_granule, count
    memset(plan, 0, sizeof(Plan))
    plan.chunk = NIL
    see_idle_pages(space, demand.lane)
    if not find_site(space, demand, &site):
        return False
    begin = site.begin
    end = claimed_end(space, chunk_at(space, site.anchor, begin), begin + demand.size)
    first_granule = granule_of(space, begin)
    last_granule = granule_of(space, end + GRANULE - 1)
    count = last_granule - first_granule
    if (not granules_ready(space, last_granule) or not pages_ready(space, count)
            or not actions_ready(plan, 2 * count + 1)
            or not holes_prepare(space.table, PLANNED_SLOTS + 8 * count)):
        return False
    if not supply_suffices(space, demand, site.missing, begin, end):
        return False
    swap_views(space, begin, end)
    plan.chunk = holes_claim(space.table, chunk_at(space, site.anchor, begin), begin, end,
                             demand.requested, demand.lane)
    see_beside(space, plan.chunk)
    fill_missing(space, plan, begin, end, demand)
    return True


cdef uint64_t claimed_end(const Space* space, uint32_t index, uint64_t end) noexcept nogil:
    # A block that ends in a hole takes the whole granule until its pages are mapped.
    while end_of(&space.table.chunks[index]) < end:
        index = space.table.chunks[index].next
    if space.table.chunks[index].state == CHUNK_HOLE:
        return address_of(space, granule_of(space, end + GRANULE - 1))
    return end


cdef bint supply_suffices(const Space* space, const Demand* demand, uint32_t missing,
                          uint64_t begin, uint64_t end) noexcept nogil:
    # Is there room under the hard limit, or enough idle memory, for what is missing?
    cdef uint64_t room = 0
    cdef uint32_t i
    cdef const Page* page
    if demand.hard_limit > demand.reserved:
        room = (demand.hard_limit - demand.reserved) >> GRANULE_BITS
    if room >= missing:
        return True
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules and is_movable(space, page, begin, end):
            room += page.granules
    return room >= missing


cdef inline bint is_movable(const Space* space, const Page* page, uint64_t begin,
                            uint64_t end) noexcept nogil:
    return (is_idle(space, page) and not overlaps(space, page, begin, end)
            and (page.dormant == NIL
                 or is_quiet(space, page.dormant_lane, page.dormant_epoch)))


# Swapping: an idle page counts where it is wanted, and its old place becomes the hole.
cdef void swap_views(Space* space, uint64_t begin, uint64_t end) noexcept nogil:
    cdef uint32_t g = granule_of(space, begin)
    cdef uint32_t last = granule_of(space, end + GRANULE - 1)
    cdef uint32_t mapped
    cdef Page* page
    while g < last:
        mapped = page_mapped_at(space, g)
        if mapped != NIL:
            page = &space.page[mapped]
            if page.dormant != NIL and page.dormant <= g < page.dormant + page.granules:
                if can_swap(space, page, begin, end):
                    swap_page(space, page)
                    g = page.active + page.granules
                    continue
        g += 1


cdef void swap_page(Space* space, Page* page) noexcept nogil:
    cdef uint32_t target = page.dormant
    cdef uint32_t lane
    cdef uint64_t epoch
    take_out(space, page, &lane, &epoch)
    page.dormant = page.active
    page.dormant_lane = lane
    page.dormant_epoch = epoch
    page.active = target
    fill_granules(space, target, page.granules, lane, epoch)
    page.seen_idle = 0
    space.swapped += 1


cdef void take_out(Space* space, Page* page, uint32_t* lane, uint64_t* epoch) noexcept nogil:
    # Makes the active place of an idle page a hole, and looks again at what is left around it.
    cdef uint64_t begin = address_of(space, page.active)
    cdef uint64_t end = address_of(space, page.active + page.granules)
    lane[0] = space.table.chunks[page.chunk].lane
    epoch[0] = space.table.chunks[page.chunk].epoch
    page.seen_idle = 0
    see_beside(space, holes_carve(space.table, page.chunk, begin, end))


cdef void see_beside(Space* space, uint32_t index) noexcept nogil:
    # What was cut off on either side of a chunk has a number of its own now.
    cdef uint32_t beside = space.table.chunks[index].prev
    if beside != NIL and space.table.chunks[beside].state == CHUNK_FREE:
        see_again(space, beside)
    beside = space.table.chunks[index].next
    if beside != NIL and space.table.chunks[beside].state == CHUNK_FREE:
        see_again(space, beside)


cdef void see_again(Space* space, uint32_t index) noexcept nogil:
    # The pages of a free chunk that were seen idle know their chunk by a number that has changed.
    cdef const Chunk* chunk = &space.table.chunks[index]
    cdef uint32_t g = granule_of(space, chunk.address + GRANULE - 1)
    cdef uint32_t last = granule_of(space, end_of(chunk))
    cdef uint32_t mapped
    while g < last:
        mapped = page_mapped_at(space, g)
        if mapped != NIL and space.page[mapped].active == g and is_idle(
                space, &space.page[mapped]):
            space.page[mapped].chunk = index
        g += 1


cdef void fill_granules(Space* space, uint32_t first, uint32_t granules, uint32_t lane,
                        uint64_t epoch) noexcept nogil:
    # Turns granules that are a hole now into free memory.
    cdef uint64_t begin = address_of(space, first)
    cdef uint32_t filled = holes_fill(space.table, hole_at(space, begin), begin,
                                      address_of(space, first + granules), lane, epoch)
    see_again(space, filled)


cdef uint32_t hole_at(const Space* space, uint64_t address) noexcept nogil:
    cdef uint32_t index = space.table.holes
    while index != NIL:
        if space.table.chunks[index].address <= address < end_of(&space.table.chunks[index]):
            return index
        index = space.table.chunks[index].bin_next
    return NIL


cdef void fill_missing(Space* space, Plan* plan, uint64_t begin, uint64_t end,
                       const Demand* demand) noexcept nogil:
    # Finds runs of granules in the claimed block without an active page, and supplies them.
    cdef uint32_t g = granule_of(space, begin)
    cdef uint32_t last = granule_of(space, end + GRANULE - 1)
    cdef uint32_t run, mapped
    cdef Demand left = demand[0]        # its reserved bytes run along with the plan
    forget_idle_inside(space, begin, end)
    while g < last:
        if is_backed(space, g):
            g += 1
            continue
        run = g
        while run < last and not is_backed(space, run):
            mapped = page_mapped_at(space, run)
            if mapped != NIL:
                drop_dormant(space, plan, mapped)
            run += 1
        while g < run:
            g += supply(space, plan, g, run - g, begin, end, &left)


cdef inline bint is_backed(const Space* space, uint32_t granule) noexcept nogil:
    cdef uint32_t mapped = page_mapped_at(space, granule)
    if mapped == NIL:
        return False
    return space.page[mapped].active <= granule < (
        space.page[mapped].active + space.page[mapped].granules)


cdef void forget_idle_inside(Space* space, uint64_t begin, uint64_t end) noexcept nogil:
    cdef uint32_t i
    for i in range(space.page_count):
        if space.page[i].granules and overlaps(space, &space.page[i], begin, end):
            space.page[i].seen_idle = 0


cdef void drop_dormant(Space* space, Plan* plan, uint32_t index) noexcept nogil:
    # The view is in the way of something else: unmap it. It was seen to be quiet.
    cdef Page* page = &space.page[index]
    cdef Action* action = action_add(plan, ACTION_DROP, index)
    action.unmap[0] = page.dormant
    view_set(space, page.dormant, page.granules, NIL)
    page.dormant = NIL


# Supplies granules at `at`, at most `wanted`; returns how many. The order is the policy.
cdef uint32_t supply(Space* space, Plan* plan, uint32_t at, uint32_t wanted, uint64_t begin,
                     uint64_t end, Demand* demand) noexcept nogil:
    cdef uint32_t granules = largest_power_of_two(wanted, page_granules(space, demand))
    cdef uint32_t chosen
    if demand.reserved + (<uint64_t>granules << GRANULE_BITS) <= demand.share_limit:
        return plan_create(space, plan, at, granules, demand)
    chosen = longest_idle(space, wanted, begin, end)
    if chosen != NIL:
        return plan_move(space, plan, chosen, at, demand)
    while granules > 1:
        granules >>= 1
        if demand.reserved + (<uint64_t>granules << GRANULE_BITS) <= demand.share_limit:
            return plan_create(space, plan, at, granules, demand)
    chosen = smallest_releasable(space, begin, end)
    if chosen != NIL:
        plan_release(space, plan, chosen, demand)
    return plan_create(space, plan, at, 1, demand)


cdef uint32_t page_granules(const Space* space, const Demand* demand) noexcept nogil:
    cdef uint32_t granules = 1
    if not space.large:
        return 1
    while (granules < MAX_PAGE_GRANULES
           and (<uint64_t>granules << (GRANULE_BITS + 1)) * PEAK_PAGES <= demand.live_peak):
        granules <<= 1
    return granules


cdef inline uint32_t largest_power_of_two(uint32_t wanted, uint32_t most) noexcept nogil:
    cdef uint32_t granules = 1
    while granules * 2 <= wanted and granules * 2 <= most:
        granules *= 2
    return granules


cdef uint32_t longest_idle(const Space* space, uint32_t wanted, uint64_t begin,
                           uint64_t end) noexcept nogil:
    # Of the movable pages that fit, the largest; of those, the longest idle.
    cdef uint32_t best = NIL
    cdef uint32_t i
    cdef const Page* page
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules == 0 or page.granules > wanted:
            continue
        if not is_movable(space, page, begin, end):
            continue
        if (best == NIL or page.granules > space.page[best].granules
                or (page.granules == space.page[best].granules
                    and page.idle_since < space.page[best].idle_since)):
            best = i
    return best


cdef uint32_t smallest_releasable(const Space* space, uint64_t begin,
                                  uint64_t end) noexcept nogil:
    cdef uint32_t best = NIL
    cdef uint32_t i
    cdef const Page* page
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules == 0 or not is_movable(space, page, begin, end):
            continue
        if not is_quiet(space, space.table.chunks[page.chunk].lane,
                        space.table.chunks[page.chunk].epoch):
            continue
        if best == NIL or page.granules < space.page[best].granules:
            best = i
    return best


cdef uint32_t plan_create(Space* space, Plan* plan, uint32_t at, uint32_t granules,
                          Demand* demand) noexcept nogil:
    cdef uint32_t index = page_slot(space)
    cdef Page* page = &space.page[index]
    cdef Action* action = action_add(plan, ACTION_CREATE, index)
    memset(page, 0, sizeof(Page))
    page.granules = granules
    page.active = at
    page.dormant = NIL
    page.busy = True
    action.to = at
    view_set(space, at, granules, index)
    space.physical += <uint64_t>granules << GRANULE_BITS
    demand.reserved += <uint64_t>granules << GRANULE_BITS
    return granules


cdef uint32_t plan_move(Space* space, Plan* plan, uint32_t index, uint32_t at,
                        const Demand* demand) noexcept nogil:
    cdef Page* page = &space.page[index]
    cdef Action* action = action_add(plan, ACTION_MOVE, index)
    cdef bint keep = demand.size * 100 >= demand.live_peak * KEEP_VIEW_PERCENT
    action.to = at
    action.origin = page.active
    action.unmap[0] = page.dormant
    if page.dormant != NIL:
        view_set(space, page.dormant, page.granules, NIL)
    take_out(space, page, &action.lane, &action.epoch)
    page.dormant = page.active
    page.dormant_lane = action.lane
    page.dormant_epoch = action.epoch
    if not keep and is_quiet(space, action.lane, action.epoch):
        action.unmap[1] = page.active
        view_set(space, page.active, page.granules, NIL)
        page.dormant = NIL
    page.active = at
    page.busy = True
    view_set(space, at, page.granules, index)
    return page.granules


cdef void plan_release(Space* space, Plan* plan, uint32_t index, Demand* demand) noexcept nogil:
    cdef Page* page = &space.page[index]
    cdef Action* action = action_add(plan, ACTION_RELEASE, index)
    action.origin = page.active
    action.unmap[0] = page.dormant
    action.unmap[1] = page.active
    if page.dormant != NIL:
        view_set(space, page.dormant, page.granules, NIL)
    take_out(space, page, &action.lane, &action.epoch)
    view_set(space, page.active, page.granules, NIL)
    space.physical -= <uint64_t>page.granules << GRANULE_BITS
    demand.reserved -= <uint64_t>page.granules << GRANULE_BITS


# ---- carrying it out, and taking it back ---------------------------------------------------------

cdef CUresult space_execute(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    # Without the arena lock. First what can run out: on failure nothing else has been done, and
    # space_undo takes the plan back. Then unmaps, then maps; a page that the driver refuses to
    # map goes back to the driver when the plan is undone.
    cdef CUresult code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    code = create_memory(space, plan, place, calls)
    if code == CUDA_SUCCESS:
        unmap_views(space, plan, place, calls)
        code = map_views(space, plan, place, calls)
        release_memory(space, plan, place, calls)
    place_leave(place)
    return code


cdef CUresult create_memory(Space* space, Plan* plan, Place* place,
                            uint64_t* calls) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t i
    cdef Page* page
    for i in range(plan.count):
        if plan.actions[i].kind != ACTION_CREATE:
            continue
        page = &space.page[plan.actions[i].page]
        code = page_create(place, <uint64_t>page.granules << GRANULE_BITS, &page.memory)
        calls[0] += 1
        if code != CUDA_SUCCESS:
            break
        plan.actions[i].created = True
    if code != CUDA_SUCCESS:
        for i in range(plan.count):
            if plan.actions[i].created:
                page_release(place, space.page[plan.actions[i].page].memory)
                calls[0] += 1
    return code


cdef void unmap_views(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    cdef uint32_t i, view
    cdef const Action* action
    for i in range(plan.count):
        action = &plan.actions[i]
        for view in range(2):
            if action.unmap[view] != NIL:
                page_unmap(place, address_of(space, action.unmap[view]),
                           <uint64_t>space.page[action.page].granules << GRANULE_BITS)
                calls[0] += 1


cdef CUresult map_views(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t i
    cdef Action* action
    cdef Page* page
    for i in range(plan.count):
        action = &plan.actions[i]
        if action.kind != ACTION_CREATE and action.kind != ACTION_MOVE:
            continue
        page = &space.page[action.page]
        code = page_map(place, address_of(space, action.to),
                        <uint64_t>page.granules << GRANULE_BITS, page.memory)
        calls[0] += 2
        if code != CUDA_SUCCESS:
            mark_failed(plan)
            break
        action.done = True
        if action.kind == ACTION_CREATE:
            space.created += 1
        else:
            space.moved += 1
    return code


cdef void mark_failed(Plan* plan) noexcept nogil:
    # The driver refused a mapping after the unmaps: what is not done cannot be put back.
    cdef uint32_t i
    for i in range(plan.count):
        plan.actions[i].mapping_failed = True


cdef void release_memory(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    cdef uint32_t i
    for i in range(plan.count):
        if plan.actions[i].kind == ACTION_RELEASE:
            page_release(place, space.page[plan.actions[i].page].memory)
            calls[0] += 1
            space.released += 1


cdef void space_finish(Space* space, Plan* plan, const Demand* demand,
                       uint64_t epoch) noexcept nogil:
    # With the arena lock again: the claimed block shrinks to what was asked for, and the slots of
    # pages given back become free.
    cdef uint32_t i
    for i in range(plan.count):
        if plan.actions[i].kind == ACTION_RELEASE:
            space.page[plan.actions[i].page].granules = 0
    if plan.chunk != NIL:
        holes_trim(space.table, plan.chunk, demand.size, epoch)


cdef void space_undo(Space* space, Plan* plan, const Demand* demand, uint64_t epoch,
                     Place* place) noexcept nogil:
    # With the arena lock: puts the books back to what the driver has. The claimed block becomes a
    # hole, then what is mapped in it becomes free again.
    cdef uint32_t first, last, i
    cdef uint64_t begin, end
    if plan.chunk != NIL:
        begin = space.table.chunks[plan.chunk].address
        end = begin + space.table.chunks[plan.chunk].size
        holes_unclaim(space.table, plan.chunk)
    for i in range(plan.count):
        undo_action(space, &plan.actions[plan.count - 1 - i], place)
    if plan.chunk != NIL:
        refill(space, begin, end, demand.lane, epoch)


cdef void undo_action(Space* space, Action* action, Place* place) noexcept nogil:
    cdef Page* page = &space.page[action.page]
    cdef uint64_t nbytes = <uint64_t>page.granules << GRANULE_BITS
    if action.done:
        return                      # it is where the plan wanted it: keep it there
    if action.kind == ACTION_CREATE:
        view_set(space, action.to, page.granules, NIL)
        space.physical -= nbytes
        if action.mapping_failed:
            page_release(place, page.memory)
        page.granules = 0
    elif action.kind == ACTION_MOVE and action.mapping_failed:
        # Its new place was refused; what is left of its old mappings goes too.
        view_set(space, action.to, page.granules, NIL)
        if page.dormant != NIL:
            page_unmap(place, address_of(space, page.dormant), nbytes)
            view_set(space, page.dormant, page.granules, NIL)
        page_release(place, page.memory)
        space.physical -= nbytes
        page.granules = 0
    elif action.kind == ACTION_MOVE:
        view_set(space, action.to, page.granules, NIL)
        page.active = action.origin
        put_back(space, action, page)
    elif action.kind == ACTION_RELEASE and not action.mapping_failed:
        space.physical += nbytes
        put_back(space, action, page)
    elif action.kind == ACTION_RELEASE:
        page.granules = 0
    elif not action.mapping_failed:
        page.dormant = action.unmap[0]
        page.dormant_lane = LANE_RELEASED
        page.dormant_epoch = 0
        view_set(space, page.dormant, page.granules, action.page)


cdef void put_back(Space* space, const Action* action, Page* page) noexcept nogil:
    # The driver was not asked yet: the page still has the views that it had.
    view_set(space, action.origin, page.granules, action.page)
    page.dormant = action.unmap[0]
    page.dormant_lane = LANE_RELEASED
    page.dormant_epoch = 0
    if page.dormant != NIL:
        view_set(space, page.dormant, page.granules, action.page)
    fill_granules(space, action.origin, page.granules, action.lane, action.epoch)


cdef void refill(Space* space, uint64_t begin, uint64_t end, uint32_t lane,
                 uint64_t epoch) noexcept nogil:
    cdef uint64_t address = begin
    cdef uint64_t stop
    while address < end:
        stop = address_of(space, granule_of(space, address) + 1)
        stop = stop if stop < end else end
        if is_backed(space, granule_of(space, address)):
            holes_fill(space.table, hole_at(space, address), address, stop, lane, epoch)
        address = stop


# ---- trimming, making, ending --------------------------------------------------------------------

cdef bint space_plan_trim(Space* space, Plan* plan) noexcept nogil:
    cdef Demand demand
    cdef uint32_t i
    cdef const Page* page
    memset(plan, 0, sizeof(Plan))
    memset(&demand, 0, sizeof(Demand))
    plan.chunk = NIL
    see_idle_pages(space, LANE_RELEASED)
    if (not actions_ready(plan, space.page_count + 1)
            or not holes_prepare(space.table, 3 * space.page_count + 1)):
        return False
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules and is_movable(space, page, 0, 0):
            plan_release(space, plan, i, &demand)
    return plan.count != 0


cdef int space_create(Space* space, Bfc* table, Place* place, uint64_t bytes_wanted,
                      bint large) noexcept nogil:
    memset(space, 0, sizeof(Space))
    space.table = table
    space.large = large
    space.bytes = bytes_wanted
    if address_reserve(place, bytes_wanted, &space.base) != CUDA_SUCCESS:
        return 1
    if holes_add_range(table, space.base, bytes_wanted, &space.region) != BFC_OK:
        address_free(place, space.base, bytes_wanted)
        space.base = 0
        return 1
    return 0


cdef void space_destroy(Space* space, Place* place) noexcept nogil:
    # Nobody uses the arena any more: every view and page goes, then the addresses.
    cdef uint32_t i
    cdef Page* page
    cdef uint64_t nbytes
    if space.base == 0:
        return
    if place != NULL and place_enter(place) == CUDA_SUCCESS:
        for i in range(space.page_count):
            page = &space.page[i]
            if page.granules == 0:
                continue
            nbytes = <uint64_t>page.granules << GRANULE_BITS
            page_unmap(place, address_of(space, page.active), nbytes)
            if page.dormant != NIL:
                page_unmap(place, address_of(space, page.dormant), nbytes)
            page_release(place, page.memory)
        address_free(place, space.base, space.bytes)
        place_leave(place)
    free(space.page)
    free(space.page_at)
    memset(space, 0, sizeof(Space))


# ---- arrays --------------------------------------------------------------------------------------

cdef bint granules_ready(Space* space, uint32_t count) noexcept nogil:
    cdef uint32_t capacity = space.granules if space.granules else 256
    cdef uint32_t* page_at
    if count <= space.granules:
        return True
    while capacity < count:
        capacity *= 2
    page_at = <uint32_t*>realloc(space.page_at, capacity * sizeof(uint32_t))
    if page_at == NULL:
        return False
    memset(page_at + space.granules, 0xFF, (capacity - space.granules) * sizeof(uint32_t))
    space.page_at = page_at
    space.granules = capacity
    return True


cdef bint pages_ready(Space* space, uint32_t count) noexcept nogil:
    cdef uint32_t capacity = space.page_capacity if space.page_capacity else 64
    cdef Page* page
    if space.page_capacity - space.page_count >= count:
        return True
    while capacity - space.page_count < count:
        capacity *= 2
    page = <Page*>realloc(space.page, capacity * sizeof(Page))
    if page == NULL:
        return False
    space.page = page
    space.page_capacity = capacity
    return True


cdef uint32_t page_slot(Space* space) noexcept nogil:
    # A slot given up by a released page, else a fresh one; pages_ready saw to the room.
    cdef uint32_t i
    for i in range(space.page_count):
        if space.page[i].granules == 0:
            return i
    space.page_count += 1
    return space.page_count - 1


cdef bint actions_ready(Plan* plan, uint32_t count) noexcept nogil:
    plan.actions = <Action*>calloc(count + 1, sizeof(Action))
    plan.capacity = count
    return plan.actions != NULL


cdef Action* action_add(Plan* plan, ActionKind kind, uint32_t page) noexcept nogil:
    cdef Action* action = &plan.actions[plan.count]
    plan.count += 1
    action.kind = kind
    action.page = page
    action.to = NIL
    action.origin = NIL
    action.unmap[0] = NIL
    action.unmap[1] = NIL
    return action


cdef void plan_free(Plan* plan) noexcept nogil:
    free(plan.actions)
    memset(plan, 0, sizeof(Plan))
    plan.chunk = NIL

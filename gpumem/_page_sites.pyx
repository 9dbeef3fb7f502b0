"""Finding the cheapest place for a block; see _pages.pxd for the model."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport CHUNK_HOLE, CHUNK_USED, Chunk, NIL, state_of
from gpumem._page_sites cimport Site
from gpumem._page_space cimport may_take
from gpumem._pages cimport (
    address_of,
    Demand,
    end_of,
    GRANULE,
    granule_of,
    is_idle,
    is_quiet,
    overlaps,
    Page,
    page_mapped_at,
    Space,
)
from gpumem._support.atomics cimport load32


cdef enum:
    IMPOSSIBLE = 0x7FFFFFFF

# A gap: a run of free chunks and holes that the taker may have, between used ones.
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
        if gap_from_first_hole(space, hole, demand.stream_slot, &gap):
            if gap.end - gap.begin >= demand.claim:
                try_gap(space, &gap, demand, best)
        hole = space.table.chunks[hole].bin_next
    return best.missing != IMPOSSIBLE


cdef inline bint in_gap(const Space* space, uint32_t index, uint32_t stream_slot) noexcept nogil:
    cdef const Chunk* chunk = &space.table.chunks[index]
    return load32(&chunk.state) == CHUNK_HOLE or may_take(space, chunk, stream_slot)


cdef bint gap_from_first_hole(const Space* space, uint32_t hole, uint32_t stream_slot,
                              Gap* gap) noexcept nogil:
    # The gap around a hole; False if an earlier hole of the same gap will tell of it.
    cdef uint32_t index = hole
    cdef uint32_t prev = space.table.chunks[index].prev
    while prev != NIL and in_gap(space, prev, stream_slot):
        if state_of(space.table, prev) == CHUNK_HOLE:
            return False
        index = prev
        prev = space.table.chunks[index].prev
    gap.first = index
    gap.begin = space.table.chunks[index].address
    while space.table.chunks[index].next != NIL and in_gap(
            space, space.table.chunks[index].next, stream_slot):
        index = space.table.chunks[index].next
    gap.end = end_of(&space.table.chunks[index])
    gap.open = space.table.chunks[index].next == NIL
    return True


cdef void try_gap(Space* space, const Gap* gap, const Demand* demand, Site* best) noexcept nogil:
    # Places worth a look: either end of the gap, either end of each free chunk in it, and behind
    # each view that is still worked through.
    cdef uint32_t index = gap.first
    cdef const Chunk* chunk
    try_site(space, gap, gap.begin, demand, best)
    if not gap.open:
        try_site(space, gap, gap.end - demand.claim, demand, best)
    while index != NIL and space.table.chunks[index].address < gap.end:
        chunk = &space.table.chunks[index]
        if load32(&chunk.state) != CHUNK_HOLE:
            try_site(space, gap, chunk.address, demand, best)
            if end_of(chunk) - gap.begin >= demand.claim:
                try_site(space, gap, end_of(chunk) - demand.claim, demand, best)
        else:
            try_behind_views(space, gap, chunk, demand, best)
        index = chunk.next


cdef void try_behind_views(Space* space, const Gap* gap, const Chunk* hole, const Demand* demand,
                           Site* best) noexcept nogil:
    # A place may not cover a view with queued work, but it may begin where one ends.
    cdef uint32_t g = granule_of(space, hole.address)
    cdef uint32_t last = granule_of(space, end_of(hole))
    cdef uint32_t mapped
    cdef const Page* page
    while g < last and g < space.granules:
        mapped = page_mapped_at(space, g)
        g += 1
        if mapped == NIL:
            continue
        page = &space.page[mapped]
        if page.dormant == NIL or not page.dormant < g <= page.dormant + page.granules:
            continue
        g = page.dormant + page.granules
        if (not is_quiet(space, page.dormant_stream_slot, page.dormant_epoch)
                and address_of(space, g) + demand.claim <= gap.end):
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
    if end > gap.end:
        return
    while True:
        chunk = &space.table.chunks[index]
        if load32(&chunk.state) == CHUNK_HOLE:
            granules = missing_in_hole(space, chunk, begin, end)
            missing += granules
            if granules == IMPOSSIBLE or missing > best.missing:
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
        if state_of(space.table, index) == CHUNK_USED:
            break
    return index


cdef uint32_t chunk_at(const Space* space, uint32_t anchor, uint64_t address) noexcept nogil:
    while end_of(&space.table.chunks[anchor]) <= address:
        anchor = space.table.chunks[anchor].next
    return anchor


cdef uint32_t missing_in_hole(const Space* space, const Chunk* hole, uint64_t begin,
                              uint64_t end) noexcept nogil:
    # Granules of a hole inside [begin, end) that no idle page's dormant view can fill; IMPOSSIBLE
    # if work is still queued through a view there, which an unmap would not wait for.
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
        elif not is_quiet(space, page.dormant_stream_slot, page.dormant_epoch):
            return IMPOSSIBLE
        else:
            missing += 1
            g += 1
    return missing


cdef bint can_swap(const Space* space, const Page* page, uint64_t begin,
                   uint64_t end) noexcept nogil:
    # Idle, and not itself part of the place that is being built?
    return is_idle(space, page) and not overlaps(space, page, begin, end)

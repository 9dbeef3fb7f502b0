"""Pages of an address space; see _pages.pxd for the model."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from gpumem._bfc cimport (
    Bfc,
    BFC_OK,
    bin_of,
    Chunk,
    CHUNK_FREE,
    Lane,
    LANE_RELEASED,
    LEVELS,
    NIL,
    STEPS,
)
from gpumem._bfc_holes cimport holes_add_range, holes_carve, holes_fill
from gpumem._driver cimport CUDA_SUCCESS, Place, place_enter, place_leave
from gpumem._page_driver cimport address_free, address_reserve, page_release, page_unmap
from gpumem._pages cimport (
    address_of,
    end_of,
    GRANULE,
    GRANULE_BITS,
    granule_of,
    is_idle,
    is_quiet,
    overlaps,
    Page,
    page_mapped_at,
    Space,
)


cdef void view_set(Space* space, uint32_t first, uint32_t granules, uint32_t page) noexcept nogil:
    cdef uint32_t g
    for g in range(first, first + granules):
        space.page_at[g] = page


cdef bint may_take(const Space* space, const Chunk* chunk, uint32_t lane) noexcept nogil:
    # Free for work of `lane` now, without asking anybody?
    return chunk.state == CHUNK_FREE and (
        chunk.lane == lane or chunk.lane == LANE_RELEASED
        or chunk.epoch <= space.table.lanes[chunk.lane].settled
        or chunk.epoch <= space.table.lanes[chunk.lane].waited)


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


cdef bint is_movable(const Space* space, const Page* page, uint64_t begin,
                     uint64_t end) noexcept nogil:
    return (is_idle(space, page) and not overlaps(space, page, begin, end)
            and (page.dormant == NIL
                 or is_quiet(space, page.dormant_lane, page.dormant_epoch)))


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

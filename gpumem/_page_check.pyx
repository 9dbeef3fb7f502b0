"""Validation of pages; see _pages.pxd for the model."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport Chunk, CHUNK_HOLE, NIL
from gpumem._pages cimport (
    end_of,
    GRANULE,
    GRANULE_BITS,
    granule_of,
    is_backed,
    Page,
    page_mapped_at,
    Space,
)


cdef int pages_check(const Space* space) noexcept nogil:
    cdef uint64_t physical = 0
    cdef uint32_t mapped = 0
    cdef uint32_t i
    cdef int broken
    cdef const Page* page
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules == 0 or page.active == NIL:
            continue
        physical += <uint64_t>page.granules << GRANULE_BITS
        if not view_holds(space, page.active, page.granules, i):
            return 40
        mapped += page.granules
        if page.dormant != NIL:
            if not view_holds(space, page.dormant, page.granules, i):
                return 40
            mapped += page.granules
    if physical != space.physical:
        return 41
    for i in range(space.granules):
        mapped -= space.page_at[i] != NIL
    if mapped != 0:
        return 42
    physical = 0
    for i in range(space.range_count):
        broken = check_range(space, space.ranges[i].region, &physical)
        if broken:
            return broken
    return 44 if physical != space.physical else 0


cdef bint view_holds(const Space* space, uint32_t first, uint32_t granules,
                     uint32_t index) noexcept nogil:
    cdef uint32_t g
    for g in range(first, first + granules):
        if page_mapped_at(space, g) != index:
            return False
    return True


cdef int check_range(const Space* space, uint32_t region, uint64_t* physical) noexcept nogil:
    # Memory under every byte of a chunk, under none of a hole.
    cdef uint32_t index = space.table.regions[region].first
    cdef const Chunk* chunk
    cdef uint32_t g, last
    while index != NIL:
        chunk = &space.table.chunks[index]
        g = granule_of(space, chunk.address)
        last = granule_of(space, end_of(chunk) + GRANULE - 1)
        if last > space.granules:
            last = space.granules
        while g < last:
            if is_backed(space, g) == (chunk.state == CHUNK_HOLE):
                return 43
            g += 1
        if chunk.state != CHUNK_HOLE:
            physical[0] += chunk.size
        index = chunk.next
    return 0


cdef const char* pages_invariant(int number) noexcept nogil:
    if number == 40:
        return "a page is noted at every granule of its views"
    if number == 41:
        return "physical is the sum over pages"
    if number == 42:
        return "a granule without a view notes no page"
    if number == 43:
        return "chunks have memory and holes have none"
    if number == 44:
        return "chunks and pages of a space have the same bytes"
    return "unknown invariant"

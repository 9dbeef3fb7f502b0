"""Blocks at planned places."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from gpumem._native.bfc.table cimport (
    Bfc, BFC_NO_METADATA, BFC_OK, bin_insert, bin_remove, chunk_allocate, CHUNK_FREE, chunk_split,
    gm_high_bit64, NIL, Region, slots_ready, state_of,
)


cdef enum:
    WORD_BITS = 6           # edges per word of `begun`: 64
    WORD_MASK = 63


cdef bint places_init(Places* places, uint64_t base, const uint64_t* edges, uint32_t edge_count,
                      uint32_t first) noexcept nogil:
    places.base = base
    places.edge_count = edge_count
    places.edges = <uint64_t*>malloc(edge_count * sizeof(uint64_t))
    places.starts = <uint32_t*>malloc(edge_count * sizeof(uint32_t))
    places.begun = <uint64_t*>calloc((edge_count >> WORD_BITS) + 1, sizeof(uint64_t))
    if places.edges == NULL or places.starts == NULL or places.begun == NULL:
        places_free(places)
        return False
    # Copied, because the caller's array may be a temporary one.
    memcpy(places.edges, edges, edge_count * sizeof(uint64_t))
    note_start(places, 0, first)
    return True


cdef void places_free(Places* places) noexcept nogil:
    free(places.edges)
    free(places.starts)
    free(places.begun)
    memset(places, 0, sizeof(Places))


cdef uint32_t places_find(Places* places, const Bfc* table, uint32_t begin,
                          uint32_t end) noexcept nogil:
    # The chunk from below covers the bytes or none does: a search would find no other.
    cdef uint32_t index = chunk_below(places, table, begin)
    if state_of(table, index) != CHUNK_FREE:
        return NIL
    if table.chunks[index].address + table.chunks[index].size < places.base + places.edges[end]:
        return NIL
    return index


cdef uint32_t places_allocate(Places* places, Bfc* table, uint32_t index, uint32_t begin,
                              uint32_t end, uint64_t requested,
                              uint32_t stream_slot) noexcept nogil:
    cdef uint64_t size = places.edges[end] - places.edges[begin]
    cdef uint32_t taken = carve(table, index, places.base + places.edges[begin], size)
    if taken == NIL:
        return NIL
    if taken != index:
        note_start(places, begin, taken)
    # What was left above begins where the block ends.
    if table.chunks[taken].next != NIL and state_of(table, table.chunks[taken].next) == CHUNK_FREE:
        note_start(places, end, table.chunks[taken].next)
    chunk_allocate(table, taken, requested, stream_slot)
    return taken


cdef uint32_t carve(Bfc* table, uint32_t index, uint64_t address, uint64_t size) noexcept nogil:
    # Exactly these bytes of a free chunk that covers them, detached; NIL: the array cannot grow.
    cdef uint64_t before = address - table.chunks[index].address
    cdef uint32_t taken = index
    # Two, for what is left below and above: nothing can fail after the chunk has left its bin.
    if not slots_ready(table, 2):
        return NIL
    bin_remove(table, index)
    if before:
        # A split bins the upper part: the two change places.
        chunk_split(table, index, before)
        taken = table.chunks[index].next
        bin_insert(table, index)
        bin_remove(table, taken)
    if table.chunks[taken].size > size:
        chunk_split(table, taken, size)
    return taken


cdef uint32_t bfc_allocate_range(Bfc* table, uint64_t address, uint64_t size, uint64_t requested,
                                 uint32_t stream_slot, int* status) noexcept nogil:
    cdef uint32_t index = bfc_free_around(table, address, size)
    status[0] = BFC_OK
    if index == NIL:
        return NIL
    index = carve(table, index, address, size)
    if index == NIL:
        status[0] = BFC_NO_METADATA
        return NIL
    chunk_allocate(table, index, requested, stream_slot)
    return index


cdef uint32_t bfc_free_around(const Bfc* table, uint64_t address, uint64_t size) noexcept nogil:
    cdef const Region* region
    cdef uint32_t i, index
    for i in range(table.region_count):
        region = &table.regions[i]
        # Modulo 2**64: an address below the region is beyond its size.
        if address - region.address >= region.size:
            continue
        index = region.first
        while index != NIL and (
                address - table.chunks[index].address >= table.chunks[index].size):
            index = table.chunks[index].next
        if index == NIL or state_of(table, index) != CHUNK_FREE:
            return NIL
        if table.chunks[index].address + table.chunks[index].size < address + size:
            return NIL
        return index
    return NIL


# ---- which chunk begins where --------------------------------------------------------------------

cdef inline void note_start(Places* places, uint32_t edge, uint32_t index) noexcept nogil:
    places.starts[edge] = index
    places.begun[edge >> WORD_BITS] |= <uint64_t>1 << (edge & WORD_MASK)


cdef uint32_t chunk_below(Places* places, const Bfc* table, uint32_t edge) noexcept nogil:
    # The one that begins at the edge or last before it. The chunk at edge 0 is merged into no
    # other, so there always is one.
    cdef uint32_t index
    while True:
        edge = begun_below(places, edge)
        index = places.starts[edge]
        if state_of(table, index) and (
                table.chunks[index].address == places.base + places.edges[edge]):
            return index
        places.begun[edge >> WORD_BITS] &= ~(<uint64_t>1 << (edge & WORD_MASK))


cdef inline uint32_t begun_below(const Places* places, uint32_t edge) noexcept nogil:
    cdef uint32_t word = edge >> WORD_BITS
    cdef uint64_t bits = places.begun[word] & (<uint64_t>-1 >> (WORD_MASK - (edge & WORD_MASK)))
    while bits == 0:
        word -= 1
        bits = places.begun[word]
    return (word << WORD_BITS) | <uint32_t>gm_high_bit64(bits)

"""Holes in address ranges: the list of them, and the changes between holes and free memory."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.bfc.table cimport (
    Bfc, bfc_add_region, BFC_NO_METADATA, BFC_OK, bin_insert, bin_remove, Chunk, chunk_absorb,
    chunk_allocate, chunk_coalesce, chunk_cut, CHUNK_FREE, chunk_free, CHUNK_HOLE, chunk_mark,
    CHUNK_USED, NIL, Region, SLOT_RELEASED, slots_ready, state_of,
)
from gpumem._support.atomics cimport store64


# ---- the list of holes ---------------------------------------------------------------------------

cdef uint32_t hole_link(Bfc* table, uint32_t index) noexcept nogil:
    # Makes a hole of a chunk that hangs in no list; it merges with holes beside it. Returns the
    # hole.
    cdef Chunk* chunk = &table.chunks[index]
    cdef uint32_t beside = chunk.prev
    chunk.state = CHUNK_HOLE
    chunk.stream_slot = SLOT_RELEASED
    chunk.epoch = 0
    if beside != NIL and state_of(table, beside) == CHUNK_HOLE:
        hole_unlink(table, beside)
        chunk_absorb(table, beside, index)
        index = beside
    beside = table.chunks[index].next
    if beside != NIL and state_of(table, beside) == CHUNK_HOLE:
        hole_unlink(table, beside)
        chunk_absorb(table, index, beside)
    chunk = &table.chunks[index]
    chunk.bin_prev = NIL
    chunk.bin_next = table.holes
    if table.holes != NIL:
        table.chunks[table.holes].bin_prev = index
    table.holes = index
    return index


cdef inline void hole_unlink(Bfc* table, uint32_t index) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    if chunk.bin_next != NIL:
        table.chunks[chunk.bin_next].bin_prev = chunk.bin_prev
    if chunk.bin_prev != NIL:
        table.chunks[chunk.bin_prev].bin_next = chunk.bin_next
    else:
        table.holes = chunk.bin_next


# ---- pieces --------------------------------------------------------------------------------------

cdef inline uint64_t end_of(const Bfc* table, uint32_t index) noexcept nogil:
    return table.chunks[index].address + table.chunks[index].size


cdef int holes_add_range(Bfc* table, uint64_t address, uint64_t size,
                         uint32_t* region) noexcept nogil:
    cdef uint32_t index
    if bfc_add_region(table, address, size, False, region) != BFC_OK:
        return BFC_NO_METADATA
    index = table.regions[region[0]].first
    # The new region is one free chunk; it becomes one hole, so no memory is counted for it.
    table.regions[region[0]].is_range = True
    bin_remove(table, index)
    hole_link(table, index)
    store64(&table.reserved, table.reserved - size)
    return BFC_OK


cdef uint32_t holes_carve(Bfc* table, uint32_t index, uint64_t begin, uint64_t end) noexcept nogil:
    index = detach(table, index, begin, end)
    store64(&table.reserved, table.reserved - (end - begin))
    return hole_link(table, index)


cdef uint32_t holes_fill(Bfc* table, uint32_t index, uint64_t begin, uint64_t end,
                         uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    index = detach(table, index, begin, end)
    chunk_mark(table, index, stream_slot, epoch)
    return chunk_coalesce(table, index)


cdef uint32_t holes_allocate(Bfc* table, uint32_t index, uint64_t begin, uint64_t end,
                             uint64_t requested, uint32_t stream_slot) noexcept nogil:
    cdef uint32_t allocated, following
    # Each piece, a free chunk or a hole, joins the pieces below it.
    allocated = detach(table, index, begin, end)
    while end_of(table, allocated) < end:
        following = table.chunks[allocated].next
        following = detach(table, following, end_of(table, allocated), end)
        chunk_absorb(table, allocated, following)
    table.chunks[allocated].stream_slot = SLOT_RELEASED
    table.chunks[allocated].epoch = 0
    chunk_allocate(table, allocated, requested, stream_slot)
    return allocated


cdef uint32_t bfc_allocate_across(Bfc* table, uint64_t size, uint64_t requested,
                                  uint32_t stream_slot, int* status) noexcept nogil:
    cdef uint32_t i, index, first
    cdef uint64_t nbytes
    cdef const Chunk* chunk
    status[0] = BFC_OK
    if not table.shared:
        return NIL
    for i in range(table.region_count):
        if table.regions[i].size == 0 or table.regions[i].persistent:
            continue
        index = table.regions[i].first
        first = NIL
        nbytes = 0
        while index != NIL:
            chunk = &table.chunks[index]
            if state_of(table, index) != CHUNK_FREE or not (
                    chunk.stream_slot == stream_slot or chunk.stream_slot == SLOT_RELEASED):
                first = NIL
                nbytes = 0
            else:
                first = index if first == NIL else first
                nbytes += chunk.size
            if nbytes >= size:
                if not slots_ready(table, 1):
                    status[0] = BFC_NO_METADATA
                    return NIL
                return holes_allocate(table, first, table.chunks[first].address,
                                      table.chunks[first].address + size, requested, stream_slot)
            index = table.chunks[index].next
    return NIL


cdef uint32_t detach(Bfc* table, uint32_t index, uint64_t begin, uint64_t end) noexcept nogil:
    # Removes a free chunk or a hole from its list, and cuts off its ends outside of [begin, end),
    # which return to the list. The returned chunk is free in slot 0, and hangs in no list.
    cdef uint32_t lower
    cdef bint hole = table.chunks[index].state == CHUNK_HOLE
    if hole:
        hole_unlink(table, index)
    else:
        bin_remove(table, index)
    table.chunks[index].state = CHUNK_USED      # for now: its cut-off ends must not merge with it
    # The upper end first: a cut leaves the lower part at `index`.
    if end < end_of(table, index):
        hang(table, chunk_cut(table, index, end - table.chunks[index].address), hole)
    if begin > table.chunks[index].address:
        lower = index
        index = chunk_cut(table, index, begin - table.chunks[index].address)
        hang(table, lower, hole)
    # The piece of a hole will have memory, which the caller provides, or it undoes the change.
    if hole:
        store64(&table.reserved, table.reserved + table.chunks[index].size)
    table.chunks[index].state = CHUNK_FREE
    table.chunks[index].stream_slot = SLOT_RELEASED
    table.chunks[index].epoch = 0
    return index


cdef inline void hang(Bfc* table, uint32_t index, bint hole) noexcept nogil:
    if hole:
        hole_link(table, index)
    else:
        table.chunks[index].state = CHUNK_FREE
        bin_insert(table, index)


cdef bint holes_trim(Bfc* table, uint32_t index, uint64_t size, uint64_t epoch) noexcept nogil:
    # True: there was more than `size`, and the remainder is free in the epoch.
    cdef uint32_t remainder
    cdef Chunk* chunk = &table.chunks[index]
    cdef uint64_t requested = chunk.requested
    cdef uint32_t stream_slot = chunk.stream_slot
    cdef uint32_t generation
    if chunk.size == size:
        return False
    # The block is freed and allocated again around the cut, so that counts and bins follow. The
    # handle stays valid, because the generation is restored.
    chunk_free(table, index, stream_slot, epoch)
    remainder = chunk_cut(table, index, size)
    generation = table.chunks[index].generation
    chunk_allocate(table, index, requested, stream_slot)
    table.chunks[index].generation = generation
    chunk_coalesce(table, remainder)
    return True


cdef uint32_t holes_undo_allocate(Bfc* table, uint32_t index) noexcept nogil:
    cdef uint64_t size = table.chunks[index].size
    # A failed allocation may have covered holes and free chunks; all of it becomes one hole.
    chunk_free(table, index, SLOT_RELEASED, 0)
    store64(&table.reserved, table.reserved - size)
    return hole_link(table, index)


# ---- a given range of addresses ------------------------------------------------------------------

cdef uint32_t bfc_allocate_range(Bfc* table, uint64_t address, uint64_t size, uint64_t requested,
                                 uint32_t stream_slot, int* status) noexcept nogil:
    cdef uint32_t index = bfc_free_around(table, address, size)
    status[0] = BFC_OK
    if index == NIL:
        return NIL
    # One slot for what is left below, one for what is left above.
    if not slots_ready(table, 2):
        status[0] = BFC_NO_METADATA
        return NIL
    return holes_allocate(table, index, address, address + size, requested, stream_slot)


cdef uint32_t bfc_free_around(const Bfc* table, uint64_t address, uint64_t size) noexcept nogil:
    cdef const Region* region
    cdef uint32_t i, index
    for i in range(table.region_count):
        region = &table.regions[i]
        # Modulo 2**64: an address below the region is above its size.
        if address - region.address >= region.size:
            continue
        index = region.first
        while index != NIL and address >= end_of(table, index):
            index = table.chunks[index].next
        if (index == NIL or state_of(table, index) != CHUNK_FREE
                or end_of(table, index) < address + size):
            return NIL
        return index
    return NIL

"""Validation of the chunk table; never on a fast path. See _native/bfc/table.pxd for what must
hold."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from gpumem._native.bfc.table cimport (
    Bfc, bin_of, BINS, Chunk, CHUNK_CACHED, CHUNK_FREE, CHUNK_HOLE, CHUNK_PENDING_FREE,
    CHUNK_UNUSED, CHUNK_USED, LEVELS, NIL, place_of, QUANTUM, Region, SLOT_RELEASED, state_of,
    STEP_BITS, STEPS, StreamBins,
)
from gpumem._support.atomics cimport load32, published64, published8


# Sums that bfc_check computes from the chunks and compares with those of the table.
cdef struct Recount:
    uint64_t in_use
    uint64_t requested
    uint64_t used
    uint64_t pending_free
    uint64_t reserved
    uint64_t chunks
    uint32_t regions


cdef int bfc_check(const Bfc* table, bint folded) noexcept nogil:
    cdef Recount sum
    cdef uint32_t region, stream_slot
    cdef int broken
    cdef uint64_t binned = 0
    cdef uint64_t unused = 0
    cdef uint32_t filled = 0
    cdef uint32_t index = table.unused
    # Regions first: the lists of bins and holes are followed only once each chunk is known to be
    # linked soundly, so that a check of a broken table ends.
    memset(&sum, 0, sizeof(sum))
    for region in range(table.region_count):
        if table.regions[region].size != 0:
            broken = check_region(table, region, &sum)
            if broken:
                return broken
    for stream_slot in range(table.stream_slot_count):
        broken = check_bins(table, stream_slot, &binned)
        if broken:
            return broken
        # Slot 0 is not counted: its memory hinders no packing.
        filled += stream_slot != SLOT_RELEASED and table.bins[stream_slot].levels != 0
    if filled != table.bins_filled:
        return 25
    broken = check_holes(table, &binned)
    if broken:
        return broken
    while index != NIL:
        # More entries than slots: the list is a circle.
        if table.chunks[index].state != CHUNK_UNUSED or unused > table.count:
            return 1
        unused += 1
        index = table.chunks[index].next
    if unused + sum.chunks != table.count:
        return 2
    # Threads' caches change the requested bytes, and fold the change in when they are flushed.
    if sum.in_use != table.in_use or (folded and sum.requested != table.requested_in_use):
        return 3
    if sum.used != table.used_chunks or sum.reserved != table.reserved:
        return 4
    if sum.regions != table.regions_live:
        return 5
    if sum.pending_free != table.pending_free_chunks:
        return 8
    # Each chunk hangs in one bin or list, or is used, pending free or a free persistent one.
    if binned + sum.used + sum.pending_free + count_persistent_free(table) != sum.chunks:
        return 6
    return 0


cdef int check_holes(const Bfc* table, uint64_t* binned) noexcept nogil:
    cdef uint64_t found = 0
    cdef uint32_t prev = NIL
    cdef uint32_t index = table.holes
    while index != NIL:
        if (table.chunks[index].state != CHUNK_HOLE or table.chunks[index].bin_prev != prev
                or found > table.count):
            return 7
        found += 1
        prev = index
        index = table.chunks[index].bin_next
    binned[0] += found
    return 0


cdef uint64_t count_persistent_free(const Bfc* table) noexcept nogil:
    # They hang in no bin, because they are never searched.
    cdef uint64_t count = 0
    cdef uint32_t region
    for region in range(table.region_count):
        if (table.regions[region].size != 0 and table.regions[region].persistent
                and state_of(table, table.regions[region].first) == CHUNK_FREE):
            count += 1
    return count


cdef int check_region(const Bfc* table, uint32_t slot, Recount* sum) noexcept nogil:
    cdef const Region* region = &table.regions[slot]
    cdef uint64_t address = region.address
    cdef uint32_t index = region.first
    cdef uint32_t prev = NIL
    cdef uint32_t used = 0
    cdef uint32_t pending_free = 0
    cdef uint32_t state
    cdef uint64_t requested
    cdef const Chunk* chunk
    while index != NIL:
        chunk = &table.chunks[index]
        # In this order: another thread that frees the block writes an epoch there after the state.
        requested = published64(&chunk.requested)
        state = published8(&chunk.state)
        if state == CHUNK_CACHED:
            requested = load32(&chunk.bin_prev)
        elif state != CHUNK_USED:
            requested = 0
        if state == CHUNK_UNUSED or chunk.prev != prev:
            return 10
        if chunk.address != address or chunk.size == 0 or chunk.size % QUANTUM:
            return 11
        if requested > chunk.size:
            return 12
        # Neighbours of different slots may both be free: their marks keep them apart.
        if (prev != NIL and state == CHUNK_FREE and state_of(table, prev) == CHUNK_FREE
                and table.chunks[prev].stream_slot == chunk.stream_slot):
            return 13
        # A cached chunk is used to the table.
        if state == CHUNK_USED or state == CHUNK_CACHED:
            used += 1
            sum.in_use += chunk.size
            sum.requested += requested
        if state == CHUNK_PENDING_FREE:
            pending_free += 1
        if chunk.persistent != region.persistent:
            return 15
        if state != CHUNK_HOLE:
            sum.reserved += chunk.size
        elif not region.is_range:
            return 16
        sum.chunks += 1
        # More chunks than slots: the links form a circle.
        if sum.chunks > table.count:
            return 10
        address += chunk.size
        prev = index
        index = chunk.next
    if address != region.address + region.size:
        return 14
    # Allocated and released whole, so that its chunk is never cut.
    if region.persistent and table.chunks[region.first].next != NIL:
        return 15
    sum.used += used
    sum.pending_free += pending_free
    sum.regions += 1
    return 0


cdef int check_bins(const Bfc* table, uint32_t slot_index, uint64_t* binned) noexcept nogil:
    cdef const StreamBins* bins = table.bins[slot_index]
    cdef uint64_t bytes_found = 0
    cdef uint64_t chunks_found = 0
    cdef uint32_t bin, index, prev
    cdef int level
    cdef const Chunk* chunk
    for level in range(LEVELS + 1):
        if (bins.steps[level] != 0) != ((bins.levels >> level) & 1):
            return 20
    for bin in range(BINS):
        index = bins.head[bin]
        if (index != NIL) != ((bins.steps[bin >> STEP_BITS] >> (bin & (STEPS - 1))) & 1):
            return 21
        if index != NIL and bins.place[bin] != place_of(&table.chunks[index]):
            return 27
        prev = NIL
        while index != NIL:
            chunk = &table.chunks[index]
            # The bin follows from the size alone.
            if bin_of(chunk.size) != bin:
                return 22
            if (chunk.state != CHUNK_FREE or chunk.stream_slot != slot_index
                    or chunk.bin_prev != prev):
                return 23
            # No epoch of slot 0 ever completes.
            if (chunk.epoch == 0) != (slot_index == SLOT_RELEASED):
                return 26
            if slot_index != SLOT_RELEASED and chunk.epoch <= bins.completed:
                return 26
            bytes_found += chunk.size
            chunks_found += 1
            # Again a circle.
            if chunks_found > table.count:
                return 23
            prev = index
            index = chunk.bin_next
    if bytes_found != bins.free_bytes or chunks_found != bins.free_chunks:
        return 24
    binned[0] += chunks_found
    return 0


cdef extern from *:
    """
    static const char *gm_bfc_invariant(unsigned number) {
        static const char *const texts[] = {
            [1] = "the list of unused slots holds only unused slots",
            [2] = "every slot is in one region or in the list of unused slots",
            [3] = "in_use and requested_in_use are the sums over used chunks",
            [4] = "used_chunks and reserved are the sums over chunks and regions",
            [5] = "regions_live counts the regions",
            [6] = "every chunk that is not used hangs in exactly one bin or list of holes",
            [7] = "the list of holes is linked both ways and holds only holes",
            [8] = "pending_free_chunks counts the pending-free chunks",
            [10] = "chunks of a region are linked both ways and belong to it",
            [11] = "chunks follow each other without gap or overlap, in quanta",
            [12] = "no more is requested than the chunk holds",
            [13] = "no two neighbours are free in the same stream slot",
            [14] = "the chunks of a region cover it exactly",
            [15] = "a persistent region is one chunk, and its chunk alone is marked as such",
            [16] = "only a range has holes",
            [20] = "a level's bit is set iff one of its steps is",
            [21] = "a step's bit is set iff its bin holds a chunk",
            [22] = "a free chunk hangs in the bin of its size",
            [23] = "a bin is linked both ways and holds free chunks of its slot",
            [24] = "a slot's free_bytes and free_chunks are the sums over its bins",
            [25] = "bins_filled counts the slots, but slot 0, that have free chunks",
            [26] = "the epoch of a free chunk has not completed; in slot 0 it is 0",
            [27] = "a bin knows the place of its head",
            [30] = "a cache's stack holds cached chunks of its size and stream, and counts them",
        };
        const char *text = number < sizeof texts / sizeof *texts ? texts[number] : 0;
        return text ? text : "unknown invariant";
    }
    """
    const char* gm_bfc_invariant(unsigned number) noexcept nogil


cdef const char* bfc_invariant(int number) noexcept nogil:
    return gm_bfc_invariant(number)

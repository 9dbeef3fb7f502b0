"""Best fit with coalescing: the chunk table."""

from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from gpumem._support.atomics cimport load32, published64, published8, store32, store64, store8
from gpumem._support.memory cimport (
    addresses_bound, array_reserve, lines_alloc, reserved_close, reserved_grow,
)


# ---- the fast path -----------------------------------------------------------------------------

cdef uint32_t bfc_allocate(Bfc* table, uint64_t size, uint64_t requested, uint32_t stream_slot,
                           int* status) noexcept nogil:
    # This memory needs no event: the stream's own blocks, which are warm, and those that every
    # stream may allocate (slot 0).
    cdef uint32_t index
    if packs_low(table, size, stream_slot):
        index = bfc_lowest(table, size, stream_slot)
        if index != NIL and may_swap(table, index, size):
            status[0] = BFC_MAY_SWAP
            return NIL
    else:
        index = bins_find(table, table.bins[stream_slot], size, <uint64_t>ANY_EPOCH)
        # An exact fit needs no second search: nothing fits better, and its own memory is warm.
        if index == NIL or table.chunks[index].size != size:
            index = smaller_of(table, index, bins_find(table, table.bins[0], size,
                                                       <uint64_t>ANY_EPOCH))
    return bfc_allocate_at(table, index, size, requested, stream_slot, status)


cdef uint32_t bfc_allocate_from(Bfc* table, uint64_t size, uint64_t requested, uint32_t source,
                                uint64_t completed, uint32_t stream_slot,
                                int* status) noexcept nogil:
    return bfc_allocate_at(table, bins_find(table, table.bins[source], size, completed), size,
                           requested, stream_slot, status)


cdef uint32_t bfc_lowest(const Bfc* table, uint64_t size, uint32_t stream_slot) noexcept nogil:
    return lower_of(table, bins_lowest(table, table.bins[stream_slot], size),
                    bins_lowest(table, table.bins[0], size))


cdef uint32_t bfc_allocate_at(Bfc* table, uint32_t index, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, int* status) noexcept nogil:
    cdef bint split
    status[0] = BFC_OK
    if index == NIL:
        return NIL
    split = split_leaves(table, table.chunks[index].size, size)
    if not split and wastes_too_much(table, table.chunks[index].size, size):
        return NIL
    # Before anything changes: the array of chunks may have to grow for the remainder of a split.
    if split and not slot_ready(table):
        status[0] = BFC_NO_METADATA
        return NIL
    bin_remove(table, index)
    if split:
        bin_insert(table, chunk_cut(table, index, size))
    chunk_allocate(table, index, requested, stream_slot)
    return index


cdef uint64_t bfc_block_size(const Bfc* table, uint64_t have, uint64_t want) noexcept nogil:
    return want if split_leaves(table, have, want) else have


cdef bint bfc_has(const Bfc* table, uint64_t size, uint32_t source) noexcept nogil:
    return bins_find(table, table.bins[source], size, <uint64_t>ANY_EPOCH) != NIL


cdef void bfc_free(Bfc* table, uint32_t index, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    chunk_free(table, index, stream_slot, epoch)
    # A persistent block is in no bin: it is never searched, its region is released whole.
    if not table.chunks[index].persistent:
        chunk_coalesce(table, index)


cdef uint32_t chunk_coalesce(Bfc* table, uint32_t index) noexcept nogil:
    index = chunk_merge(table, index)
    bin_insert(table, index)
    return index


# ---- finding -----------------------------------------------------------------------------------

cdef inline uint32_t bins_find(const Bfc* table, const StreamBins* bins, uint64_t size,
                               uint64_t completed) noexcept nogil:
    cdef uint32_t bin, found
    if bins.levels == 0:
        return NIL
    bin = bin_of(size)
    # Chunks in the request's own bin may be smaller than it, so this bin has to be searched.
    found = bin_best(table, bins.head[bin], size, completed)
    if found != NIL:
        return found
    # Any chunk of a later bin is large enough.
    bin = bin_from(bins, bin + 1)
    return NIL if bin == NIL else bin_best(table, bins.head[bin], size, completed)


cdef inline uint32_t smaller_of(const Bfc* table, uint32_t a, uint32_t b) noexcept nogil:
    if a == NIL or b == NIL:
        return b if a == NIL else a
    return b if table.chunks[b].size < table.chunks[a].size else a


cdef inline uint32_t lower_of(const Bfc* table, uint32_t a, uint32_t b) noexcept nogil:
    if a == NIL or b == NIL:
        return b if a == NIL else a
    return b if table.chunks[b].address < table.chunks[a].address else a


cdef inline bint may_swap(Bfc* table, uint32_t index, uint64_t size) noexcept nogil:
    # Only instead of splitting a chunk of twice the size: a close fit is a good place.
    if (table.chunks[index].address <= table.swaps_from or size < SWAP_BYTES
            or table.chunks[index].size < 2 * size):
        return False
    # A search costs microseconds, and most find nothing. No search is left out for a block that is
    # a large part of the bytes in use, because its place matters most.
    if (size >= table.swapless and table.swaps_skipped < SWAP_SKIPS
            and size * SWAP_PARTS < table.in_use):
        table.swaps_skipped += 1
        return False
    return True


cdef uint32_t bins_lowest(const Bfc* table, const StreamBins* bins, uint64_t size) noexcept nogil:
    # Returns the lowest of the heads of PACK_LIMIT bins, from the smallest that fit upward. Chunks
    # of the request's own bin may be too small: there only the head is read.
    if bins.levels == 0:
        return NIL
    cdef uint32_t own = bin_of(size)
    cdef uint32_t level = own >> STEP_BITS
    cdef bint fits = bins.head[own] != NIL and table.chunks[bins.head[own]].size >= size
    # The steps from its own on and those of the next level: mostly one word has all bins.
    cdef uint64_t filled = (bins.steps[level] & <uint64_t>(fits - 2) << (own & (STEPS - 1))
                            | <uint64_t>bins.steps[level + 1] << STEPS)
    cdef uint64_t levels = bins.levels & <uint64_t>-4 << level
    # Place and bin in one word, so that the lower one is chosen without a branch, which would be
    # mispredicted at random.
    cdef uint64_t lowest = <uint64_t>NIL << 32
    cdef uint64_t seen
    cdef uint32_t bin
    cdef int left = PACK_LIMIT
    while True:
        while filled != 0 and left != 0:
            bin = (level << STEP_BITS) + gm_low_bit64(filled)
            filled &= filled - 1        # clears the lowest bit
            left -= 1
            seen = <uint64_t>bins.place[bin] << 32 | bin
            lowest = seen if seen < lowest else lowest
        if levels == 0 or left == 0:
            break
        level = <uint32_t>gm_low_bit64(levels)
        levels &= levels - 1
        filled = bins.steps[level]
    return NIL if lowest >> 32 == NIL else bins.head[<uint32_t>lowest]


cdef inline uint32_t bin_best(const Bfc* table, uint32_t index, uint64_t size,
                              uint64_t completed) noexcept nogil:
    # Returns the smallest chunk that fits among the first SCAN_LIMIT of a bin.
    cdef uint32_t best = NIL
    cdef uint64_t best_size = <uint64_t>-1
    cdef uint64_t best_address = 0
    cdef int looked = 0
    cdef bint better
    cdef const Chunk* chunk
    while index != NIL and looked < SCAN_LIMIT:
        chunk = &table.chunks[index]
        # The lower of two equal chunks, so that free memory gathers at the top of a region.
        better = ((chunk.size >= size) & (chunk.epoch <= completed)
                  & ((chunk.size < best_size)
                     | ((chunk.size == best_size) & (chunk.address < best_address))))
        best = index if better else best
        best_size = chunk.size if better else best_size
        best_address = chunk.address if better else best_address
        index = chunk.bin_next
        looked += 1
    return best


# ---- one function per change of state ----------------------------------------------------------

cdef void bin_insert(Bfc* table, uint32_t index) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef StreamBins* bins = table.bins[chunk.stream_slot]
    cdef uint32_t bin = bin_of(chunk.size)
    cdef uint32_t place = place_of(chunk)
    cdef uint32_t head = bins.head[bin]
    bins.free_bytes += chunk.size
    bins.free_chunks += 1
    if head != NIL and table.packs and bins.place[bin] < place:
        link_behind(table, head, index)
        return
    if bins.levels == 0 and chunk.stream_slot != SLOT_RELEASED:
        store32(&table.bins_filled, table.bins_filled + 1)
    # At the head: the latest freed chunk is found first, and insertion needs no search.
    chunk.bin_prev = NIL
    chunk.bin_next = head
    if head != NIL:
        table.chunks[head].bin_prev = index
    bins.head[bin] = index
    bins.place[bin] = place
    bins.steps[bin >> STEP_BITS] |= <uint32_t>1 << (bin & (STEPS - 1))
    bins.levels |= <uint64_t>1 << (bin >> STEP_BITS)


cdef inline void link_behind(Bfc* table, uint32_t before, uint32_t index) noexcept nogil:
    cdef uint32_t after = table.chunks[before].bin_next
    table.chunks[index].bin_prev = before
    table.chunks[index].bin_next = after
    table.chunks[before].bin_next = index
    if after != NIL:
        table.chunks[after].bin_prev = index


cdef void bin_remove(Bfc* table, uint32_t index) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef StreamBins* bins = table.bins[chunk.stream_slot]
    cdef uint32_t bin
    # Only the head of a bin needs its bin; the bits are cleared when it was the last chunk.
    if chunk.bin_next != NIL:
        table.chunks[chunk.bin_next].bin_prev = chunk.bin_prev
    if chunk.bin_prev != NIL:
        table.chunks[chunk.bin_prev].bin_next = chunk.bin_next
    else:
        bin = bin_of(chunk.size)
        bins.head[bin] = chunk.bin_next
        if chunk.bin_next != NIL:
            bins.place[bin] = place_of(&table.chunks[chunk.bin_next])
        else:
            bin_empty(table, chunk.stream_slot, bin)
    bins.free_bytes -= chunk.size
    bins.free_chunks -= 1


cdef inline void bin_empty(Bfc* table, uint32_t stream_slot, uint32_t bin) noexcept nogil:
    cdef StreamBins* bins = table.bins[stream_slot]
    cdef uint32_t level = bin >> STEP_BITS
    bins.steps[level] &= ~(<uint32_t>1 << (bin & (STEPS - 1)))
    if bins.steps[level] == 0:
        bins.levels &= ~(<uint64_t>1 << level)
        if bins.levels == 0 and stream_slot != SLOT_RELEASED:
            store32(&table.bins_filled, table.bins_filled - 1)


cdef void chunk_allocate(Bfc* table, uint32_t index, uint64_t requested,
                         uint32_t stream_slot) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    chunk.requested = requested
    chunk.stream_slot = <uint16_t>stream_slot
    chunk.bin_prev = 0          # it belongs to no cache
    chunk.bin_next = 0
    store32(&chunk.generation, chunk.generation + 1)
    store8(&chunk.state, CHUNK_USED)
    store64(&table.in_use, table.in_use + chunk.size)
    table.requested_in_use += requested
    table.used_chunks += 1


cdef void chunk_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                     uint64_t epoch) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    store64(&table.in_use, table.in_use - chunk.size)
    table.requested_in_use -= chunk.requested
    table.used_chunks -= 1
    store8(&chunk.state, CHUNK_FREE)
    chunk_mark(table, index, stream_slot, epoch)


cdef void chunk_mark(Bfc* table, uint32_t index, uint32_t stream_slot,
                     uint64_t epoch) noexcept nogil:
    # No epoch of slot 0 ever completes: its chunks have epoch 0.
    if epoch <= table.bins[stream_slot].completed:
        stream_slot = SLOT_RELEASED
        epoch = 0
    table.chunks[index].stream_slot = <uint16_t>stream_slot
    table.chunks[index].epoch = epoch


cdef inline bint split_leaves(const Bfc* table, uint64_t have, uint64_t want) noexcept nogil:
    # Returns whether the remainder of a chunk of `have` bytes is worth a chunk of its own.
    if table.split_rule == SPLIT_TIGHT:
        return have > want
    if table.split_rule == SPLIT_NEVER or table.split_rule == SPLIT_EXACT:
        return False
    return have >= 2 * want or have - want >= table.max_dead


cdef inline bint wastes_too_much(Bfc* table, uint64_t have, uint64_t want) noexcept nogil:
    # A chunk of nearly the request's size always suits: its region was made for such a block.
    if table.split_rule != SPLIT_EXACT or have - want <= want >> NEARLY_BITS:
        return False
    if have - want > table.max_dead:
        return True
    table.max_dead -= have - want
    return False


cdef uint32_t chunk_cut(Bfc* table, uint32_t index, uint64_t size) noexcept nogil:
    cdef uint32_t remainder_index = slot_allocate(table)
    cdef Chunk* chunk = &table.chunks[index]
    cdef Chunk* remainder = &table.chunks[remainder_index]
    # The generation is the slot's own: handles of its last block stay stale.
    remainder.address = chunk.address + size
    remainder.size = chunk.size - size
    remainder.epoch = chunk.epoch
    remainder.stream_slot = chunk.stream_slot
    remainder.state = CHUNK_FREE
    remainder.persistent = False
    remainder.prev = index
    remainder.next = chunk.next
    if chunk.next != NIL:
        table.chunks[chunk.next].prev = remainder_index
    chunk.next = remainder_index
    chunk.size = size
    return remainder_index


cdef inline bint can_merge(const Bfc* table, uint32_t index, uint32_t beside) noexcept nogil:
    # Whether a free chunk may merge with its neighbour: a mark may spread over memory that is free
    # for every stream, never over another stream's.
    cdef const Chunk* a = &table.chunks[index]
    cdef const Chunk* b
    if beside == NIL or state_of(table, beside) != CHUNK_FREE:
        return False
    b = &table.chunks[beside]
    if a.stream_slot == b.stream_slot:
        return True
    if a.stream_slot == SLOT_RELEASED:
        return may_spread(table, b.size, a.size)
    return b.stream_slot == SLOT_RELEASED and may_spread(table, a.size, b.size)


cdef inline bint may_spread(const Bfc* table, uint64_t marked, uint64_t released) noexcept nogil:
    # With several streams, a stamped chunk merges only with released neighbours no larger than
    # itself. Otherwise one small free would make gigabytes unavailable to other streams; never
    # merging would fragment the table.
    return table.merge_released and (released <= marked or not table.shared)


cdef uint32_t chunk_merge(Bfc* table, uint32_t index) noexcept nogil:
    # It tries again after each merge, because a larger chunk, or one with another mark, may merge
    # with more. Each merge removes a chunk that an earlier split had made.
    cdef uint32_t other
    while True:
        other = table.chunks[index].next
        if can_merge(table, index, other):
            bin_remove(table, other)
            chunk_absorb(table, index, other)
            continue
        other = table.chunks[index].prev
        if not can_merge(table, index, other):
            return index
        bin_remove(table, other)
        chunk_absorb(table, other, index)
        index = other


cdef void chunk_absorb(Bfc* table, uint32_t index, uint32_t other) noexcept nogil:
    # `other` follows `index`; both are free and in no bin. The stricter mark survives.
    cdef Chunk* low = &table.chunks[index]
    cdef Chunk* high = &table.chunks[other]
    if low.stream_slot == high.stream_slot:
        if high.epoch > low.epoch:
            low.epoch = high.epoch
    elif low.stream_slot == SLOT_RELEASED:
        low.stream_slot = high.stream_slot
        low.epoch = high.epoch
    # The epoch of a merged chunk is the later one: all of its memory is safe only after that.
    low.size += high.size
    low.next = high.next
    if high.next != NIL:
        table.chunks[high.next].prev = index
    slot_free(table, other)


# ---- slots of the chunk array ------------------------------------------------------------------

cdef inline bint slot_ready(Bfc* table) noexcept nogil:
    return table.unused != NIL or table.count < table.capacity or chunks_grow(table)


cdef bint slots_ready(Bfc* table, uint32_t count) noexcept nogil:
    # Unused slots below `count` are not counted; they are a reserve.
    while table.capacity - table.count < count:
        if not chunks_grow(table):
            return False
    return True


cdef bint chunks_grow(Bfc* table) noexcept nogil:
    return reserved_grow(<void**>&table.chunks, &table.capacity, table.max_chunks, sizeof(Chunk))


cdef uint32_t slot_allocate(Bfc* table) noexcept nogil:
    cdef uint32_t index = table.unused
    if index != NIL:
        table.unused = table.chunks[index].next
        return index
    index = table.count
    store32(&table.count, index + 1)
    return index


cdef inline void slot_free(Bfc* table, uint32_t index) noexcept nogil:
    # The generation stays, so that a handle of the old block does not fit the next one.
    table.chunks[index].state = CHUNK_UNUSED
    table.chunks[index].next = table.unused
    table.unused = index


# ---- regions and stream slots ------------------------------------------------------------------

cdef int bfc_init(Bfc* table, SplitRule split_rule, uint64_t max_dead) noexcept nogil:
    cdef uint32_t stream_slot
    memset(table, 0, sizeof(Bfc))
    table.unused = NIL
    table.holes = NIL
    table.swaps_from = table.swapless = <uint64_t>-1
    table.split_rule = split_rule
    table.max_dead = max_dead
    table.max_chunks = <uint32_t>(addresses_bound(<uint64_t>MAX_CHUNKS * sizeof(Chunk))
                                  // sizeof(Chunk))
    return bfc_add_stream_slot(table, &stream_slot)


cdef void bfc_free_all(Bfc* table) noexcept nogil:
    cdef uint32_t stream_slot
    for stream_slot in range(table.stream_slot_count):
        free(table.bins[stream_slot])
    free(table.bins)
    free(table.regions)
    reserved_close(table.chunks, <size_t>table.max_chunks * sizeof(Chunk))


cdef int bfc_add_stream_slot(Bfc* table, uint32_t* stream_slot) noexcept nogil:
    cdef size_t nbytes = (table.stream_slot_count + 1) * sizeof(StreamBins*)
    cdef StreamBins** bins = <StreamBins**>realloc(table.bins, nbytes)
    if bins == NULL:
        return BFC_NO_METADATA
    table.bins = bins
    cdef StreamBins* fresh = <StreamBins*>lines_alloc(sizeof(StreamBins))
    if fresh == NULL:
        return BFC_NO_METADATA
    memset(fresh.head, 0xFF, sizeof(fresh.head))     # NIL in every head
    bins[table.stream_slot_count] = fresh
    stream_slot[0] = table.stream_slot_count
    table.stream_slot_count += 1
    return BFC_OK


cdef int bfc_add_region(Bfc* table, uint64_t address, uint64_t size, bint persistent,
                        uint32_t* region) noexcept nogil:
    cdef uint32_t slot, index
    if not region_slot_ready(table, &slot) or not slot_ready(table):
        return BFC_NO_METADATA
    index = slot_allocate(table)
    cdef Chunk* chunk = &table.chunks[index]
    chunk.address = address
    chunk.size = size
    chunk.epoch = 0
    chunk.prev = chunk.next = NIL
    chunk.stream_slot = SLOT_RELEASED
    chunk.state = CHUNK_FREE
    chunk.persistent = persistent
    cdef Region* fresh = &table.regions[slot]
    fresh.address = address
    fresh.size = size
    fresh.first = index
    fresh.id = table.next_region_id
    fresh.persistent = persistent
    fresh.is_range = False
    table.next_region_id += 1
    table.regions_live += 1
    store64(&table.reserved, table.reserved + size)
    if persistent:
        chunk.bin_prev = chunk.bin_next = NIL
    else:
        bin_insert(table, index)
    region[0] = slot
    return BFC_OK


cdef bint region_slot_ready(Bfc* table, uint32_t* slot) noexcept nogil:
    cdef uint32_t i
    # A slot of a region that was removed comes first: numbers of regions stay small.
    for i in range(table.region_count):
        if table.regions[i].size == 0:
            slot[0] = i
            return True
    if not array_reserve(<void**>&table.regions, &table.region_capacity, table.region_count + 1, 8,
                         sizeof(Region)):
        return False
    slot[0] = table.region_count
    table.regions[slot[0]].size = 0
    table.region_count += 1
    return True


cdef uint32_t bfc_allocate_region(Bfc* table, uint32_t region, uint64_t requested,
                                  uint32_t stream_slot) noexcept nogil:
    cdef uint32_t index = table.regions[region].first
    if not table.regions[region].persistent:
        bin_remove(table, index)
    chunk_allocate(table, index, requested, stream_slot)
    return index


cdef bint bfc_region_is_idle(const Bfc* table, uint32_t region) noexcept nogil:
    # Free neighbours are mostly one chunk, so that a used one, if any, is found at once.
    cdef uint32_t index = table.regions[region].first
    if table.regions[region].size == 0 or table.regions[region].is_range:
        return False
    while index != NIL:
        if state_of(table, index) != CHUNK_FREE:
            return False
        index = table.chunks[index].next
    return True


cdef void bfc_remove_region(Bfc* table, uint32_t region) noexcept nogil:
    # All its chunks are free; there may be several, because marks keep neighbours apart.
    cdef Region* gone = &table.regions[region]
    cdef uint32_t index = gone.first
    cdef uint32_t next_index
    while index != NIL:
        next_index = table.chunks[index].next
        if not gone.persistent:
            bin_remove(table, index)
        slot_free(table, index)
        index = next_index
    store64(&table.reserved, table.reserved - gone.size)
    table.regions_live -= 1
    gone.size = 0


cdef enum:
    RELEASED_AT_ONCE = 256      # chunks; each merge changes the lists that are walked


cdef void bfc_release_completed(Bfc* table, uint32_t stream_slot,
                                uint64_t completed) noexcept nogil:
    cdef uint32_t found[RELEASED_AT_ONCE]
    cdef uint32_t count, i
    cdef Chunk* chunk
    # Set even if nothing is free now: a block that is freed later may have an older stamp.
    table.bins[stream_slot].completed = completed
    while True:
        count = completed_chunks(table, table.bins[stream_slot], completed, found)
        if count == 0:
            return
        for i in range(count):
            chunk = &table.chunks[found[i]]
            # An earlier one may have merged with it.
            if state_of(table, found[i]) != CHUNK_FREE or chunk.stream_slot != stream_slot:
                continue
            # It leaves the bins before its slot changes: they are found by the slot.
            bin_remove(table, found[i])
            chunk.stream_slot = SLOT_RELEASED
            chunk.epoch = 0
            bin_insert(table, chunk_merge(table, found[i]))


cdef uint32_t completed_chunks(const Bfc* table, const StreamBins* bins, uint64_t completed,
                               uint32_t* found) noexcept nogil:
    # Finds the first chunks of these epochs in the bins.
    cdef uint32_t bin = bin_from(bins, 0)
    cdef uint32_t count = 0
    cdef uint32_t index
    while bin != NIL:
        index = bins.head[bin]
        while index != NIL:
            if table.chunks[index].epoch <= completed:
                found[count] = index
                count += 1
                if count == RELEASED_AT_ONCE:
                    return count
            index = table.chunks[index].bin_next
        bin = bin_from(bins, bin + 1)
    return count


# ---- reads -------------------------------------------------------------------------------------

cdef uint64_t bfc_largest_free(const Bfc* table) noexcept nogil:
    # Finds the largest of the topmost filled bin of each stream slot; not on the fast path.
    cdef uint64_t largest = 0
    cdef uint32_t stream_slot, level, steps, index
    for stream_slot in range(table.stream_slot_count):
        if table.bins[stream_slot].levels == 0:
            continue
        level = <uint32_t>gm_high_bit64(table.bins[stream_slot].levels)
        steps = table.bins[stream_slot].steps[level]
        index = table.bins[stream_slot].head[(level << STEP_BITS) + gm_high_bit64(steps)]
        while index != NIL:
            if table.chunks[index].size > largest:
                largest = table.chunks[index].size
            index = table.chunks[index].bin_next
    return largest


# ---- Pending free --------------------------------------------------------------------------------

cdef void bfc_begin_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                                 uint64_t epoch) noexcept nogil:
    chunk_free(table, index, stream_slot, epoch)
    store8(&table.chunks[index].state, CHUNK_PENDING_FREE)
    table.pending_free_chunks += 1


cdef void bfc_end_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                               uint64_t epoch) noexcept nogil:
    table.pending_free_chunks -= 1
    store8(&table.chunks[index].state, CHUNK_FREE)
    # A persistent block hangs in no bin; the mark says when its region may be released.
    chunk_mark(table, index, stream_slot, epoch)
    if not table.chunks[index].persistent:
        chunk_coalesce(table, index)


# ---- validation, never on a fast path ------------------------------------------------------------

# Sums that bfc_check computes from the chunks and compares with those of the table.
cdef struct Recount:
    uint64_t in_use
    uint64_t requested
    uint64_t used
    uint64_t pending_free
    uint64_t persistent_free
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
        # Slot 0 is not counted: its memory does not prevent packing.
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
    if binned + sum.used + sum.pending_free + sum.persistent_free != sum.chunks:
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
        # A cached chunk is used in the table.
        if state == CHUNK_USED or state == CHUNK_CACHED:
            used += 1
            sum.in_use += chunk.size
            sum.requested += requested
        if state == CHUNK_PENDING_FREE:
            pending_free += 1
        if chunk.persistent != region.persistent:
            return 15
        # It hangs in no bin, because it is never searched.
        sum.persistent_free += region.persistent and state == CHUNK_FREE
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

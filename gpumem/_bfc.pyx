"""Best fit with coalescing over indices; see _bfc.pxd for the model and its invariants."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from gpumem._support.atomics cimport store32
from gpumem._support.memory cimport reserved_close, reserved_commit, reserved_open


# ---- the fast path -----------------------------------------------------------------------------

cdef uint32_t bfc_take(Bfc* table, uint64_t size, uint64_t requested, uint32_t lane,
                       int* status) noexcept nogil:
    # From what costs no question: the stream's own blocks, which are warm, and those that everybody
    # may have (lane 0). Then the lanes of other streams as far as they have settled.
    cdef uint32_t other
    cdef uint32_t index
    if packs_low(table, size, lane):
        index = lower_of(table, lane_lowest(table, table.lanes[lane], size),
                         lane_lowest(table, table.lanes[0], size))
    else:
        index = lane_find(table, table.lanes[lane], size, <uint64_t>ANY_EPOCH)
        if index == NIL or table.chunks[index].size != size:
            index = smaller_of(table, index, lane_find(table, table.lanes[0], size,
                                                       <uint64_t>ANY_EPOCH))
    if index != NIL:
        return take_found(table, index, size, requested, lane, status)
    for other in range(1, table.lane_count):
        if other != lane and table.lanes[other].levels != 0:
            index = bfc_take_from(table, size, requested, other, table.lanes[other].settled, lane,
                                  status)
            if index != NIL or status[0] != BFC_OK:
                return index
    status[0] = BFC_OK
    return NIL


cdef uint32_t bfc_take_from(Bfc* table, uint64_t size, uint64_t requested, uint32_t source,
                            uint64_t settled, uint32_t lane, int* status) noexcept nogil:
    cdef uint32_t index = lane_find(table, table.lanes[source], size, settled)
    status[0] = BFC_OK
    return NIL if index == NIL else take_found(table, index, size, requested, lane, status)


cdef inline uint32_t take_found(Bfc* table, uint32_t index, uint64_t size, uint64_t requested,
                                uint32_t lane, int* status) noexcept nogil:
    cdef bint split = split_leaves(table, table.chunks[index].size, size)
    if split and not slot_ready(table):
        status[0] = BFC_NO_METADATA
        return NIL
    status[0] = BFC_OK
    bin_remove(table, index)
    if split:
        chunk_split(table, index, size)
    chunk_use(table, index, requested, lane)
    return index


cdef bint bfc_has(const Bfc* table, uint64_t size, uint32_t source) noexcept nogil:
    return lane_find(table, table.lanes[source], size, <uint64_t>ANY_EPOCH) != NIL


cdef void bfc_give(Bfc* table, uint32_t index, uint32_t lane, uint64_t epoch) noexcept nogil:
    chunk_unuse(table, index, lane, epoch)
    # A persistent block hangs in no bin: nobody takes it, its region goes back whole.
    if not table.regions[table.chunks[index].region].persistent:
        chunk_coalesce(table, index)


cdef uint32_t chunk_coalesce(Bfc* table, uint32_t index) noexcept nogil:
    index = chunk_merge_next(table, index)
    index = chunk_merge_prev(table, index)
    bin_insert(table, index)
    return index


# ---- finding -----------------------------------------------------------------------------------

cdef inline uint32_t lane_find(const Bfc* table, const Lane* lane, uint64_t size,
                               uint64_t settled) noexcept nogil:
    cdef uint32_t level, step, found
    if lane.levels == 0:
        return NIL
    bin_of(size, &level, &step)
    found = bin_best(table, lane.head[level][step], size, settled)
    if found != NIL:
        return found
    # Any chunk of a later bin is large enough: first the rest of this level, then the levels above.
    cdef uint32_t steps = lane.steps[level] & <uint32_t>(<uint64_t>0xFFFFFFFE << step)
    cdef uint64_t levels
    if steps == 0:
        levels = lane.levels & (<uint64_t>-2 << level)
        if levels == 0:
            return NIL
        level = <uint32_t>gm_low_bit64(levels)
        steps = lane.steps[level]
    return bin_best(table, lane.head[level][gm_low_bit32(steps)], size, settled)


cdef inline uint32_t smaller_of(const Bfc* table, uint32_t a, uint32_t b) noexcept nogil:
    if a == NIL or b == NIL:
        return b if a == NIL else a
    return b if table.chunks[b].size < table.chunks[a].size else a


cdef inline uint32_t lower_of(const Bfc* table, uint32_t a, uint32_t b) noexcept nogil:
    if a == NIL or b == NIL:
        return b if a == NIL else a
    return b if table.chunks[b].address < table.chunks[a].address else a


cdef uint32_t lane_lowest(const Bfc* table, const Lane* lane, uint64_t size) noexcept nogil:
    # The lowest of up to PACK_LIMIT chunks that fit, from the smallest bin upward. In the request's
    # own bin SCAN_LIMIT are looked at, of the later bins every chunk fits.
    cdef uint32_t level, step, steps, index
    cdef uint64_t levels
    cdef uint32_t lowest = NIL
    cdef int fitting = 0
    cdef int looked = 0
    bin_of(size, &level, &step)
    steps = lane.steps[level] & <uint32_t>(<uint64_t>0xFFFFFFFF << step)
    levels = lane.levels & (<uint64_t>-2 << level)
    while True:
        while steps != 0:
            index = lane.head[level][gm_low_bit32(steps)]
            steps &= steps - 1
            looked = 0
            while index != NIL and looked < SCAN_LIMIT and fitting < PACK_LIMIT:
                if table.chunks[index].size >= size:
                    lowest = lower_of(table, lowest, index)
                    fitting += 1
                looked += 1
                index = table.chunks[index].bin_next
        if levels == 0 or fitting == PACK_LIMIT:
            return lowest
        level = <uint32_t>gm_low_bit64(levels)
        levels &= levels - 1
        steps = lane.steps[level]


cdef inline uint32_t bin_best(const Bfc* table, uint32_t index, uint64_t size,
                              uint64_t settled) noexcept nogil:
    # The smallest chunk that fits among the first SCAN_LIMIT of a bin, the lower address if equal.
    cdef uint32_t best = NIL
    cdef uint64_t best_size = <uint64_t>-1
    cdef uint64_t best_address = 0
    cdef int looked = 0
    cdef const Chunk* chunk
    while index != NIL and looked < SCAN_LIMIT:
        chunk = &table.chunks[index]
        if chunk.size >= size and chunk.epoch <= settled:
            if chunk.size < best_size or (chunk.size == best_size
                                          and chunk.address < best_address):
                best = index
                best_size = chunk.size
                best_address = chunk.address
        index = chunk.bin_next
        looked += 1
    return best


# ---- one function per change of state ----------------------------------------------------------

cdef void bin_insert(Bfc* table, uint32_t index) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef Lane* lane = table.lanes[chunk.lane]
    cdef uint32_t level, step, head
    bin_of(chunk.size, &level, &step)
    head = lane.head[level][step]
    if lane.levels == 0 and chunk.lane != LANE_RELEASED:
        store32(&table.lanes_filled, table.lanes_filled + 1)
    chunk.bin_prev = NIL
    chunk.bin_next = head
    if head != NIL:
        table.chunks[head].bin_prev = index
    lane.head[level][step] = index
    lane.steps[level] |= <uint32_t>1 << step
    lane.levels |= <uint64_t>1 << level
    lane.free_bytes += chunk.size
    lane.free_chunks += 1


cdef void bin_remove(Bfc* table, uint32_t index) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    cdef Lane* lane = table.lanes[chunk.lane]
    cdef uint32_t level, step
    if chunk.bin_next != NIL:
        table.chunks[chunk.bin_next].bin_prev = chunk.bin_prev
    if chunk.bin_prev != NIL:
        table.chunks[chunk.bin_prev].bin_next = chunk.bin_next
    else:
        bin_of(chunk.size, &level, &step)
        lane.head[level][step] = chunk.bin_next
        if chunk.bin_next == NIL:
            lane.steps[level] &= ~(<uint32_t>1 << step)
            if lane.steps[level] == 0:
                lane.levels &= ~(<uint64_t>1 << level)
                if lane.levels == 0 and chunk.lane != LANE_RELEASED:
                    store32(&table.lanes_filled, table.lanes_filled - 1)
    lane.free_bytes -= chunk.size
    lane.free_chunks -= 1


cdef void chunk_use(Bfc* table, uint32_t index, uint64_t requested,
                    uint32_t lane) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    chunk.requested = requested
    chunk.lane = lane
    chunk.bin_prev = 0          # at home in no cache
    chunk.bin_next = 0
    store32(&chunk.generation, chunk.generation + 1)
    store32(&chunk.state, CHUNK_USED)
    table.regions[chunk.region].used += 1
    table.in_use += chunk.size
    table.requested_in_use += requested
    table.used_chunks += 1


cdef void chunk_unuse(Bfc* table, uint32_t index, uint32_t lane,
                      uint64_t epoch) noexcept nogil:
    cdef Chunk* chunk = &table.chunks[index]
    table.regions[chunk.region].used -= 1
    table.in_use -= chunk.size
    table.requested_in_use -= chunk.requested
    table.used_chunks -= 1
    store32(&chunk.state, CHUNK_FREE)
    chunk.requested = 0
    chunk.lane = lane
    chunk.epoch = epoch if lane != LANE_RELEASED else 0


cdef inline bint split_leaves(const Bfc* table, uint64_t have, uint64_t want) noexcept nogil:
    # Is the rest of a chunk of `have` bytes worth a chunk of its own?
    if table.split_rule == SPLIT_TIGHT:
        return have > want
    return have >= 2 * want or have - want >= table.max_dead


cdef void chunk_split(Bfc* table, uint32_t index, uint64_t size) noexcept nogil:
    # Cuts a detached free chunk after `size` bytes; the rest keeps lane and epoch and is binned.
    # The slot was made ready by the caller, so nothing here can fail or move the array.
    cdef uint32_t rest_index = slot_take(table)
    cdef Chunk* chunk = &table.chunks[index]
    cdef Chunk* rest = &table.chunks[rest_index]
    rest.address = chunk.address + size
    rest.size = chunk.size - size
    rest.requested = 0
    rest.epoch = chunk.epoch
    rest.lane = chunk.lane
    rest.region = chunk.region
    rest.state = CHUNK_FREE
    rest.prev = index
    rest.next = chunk.next
    if chunk.next != NIL:
        table.chunks[chunk.next].prev = rest_index
    chunk.next = rest_index
    chunk.size = size
    bin_insert(table, rest_index)


cdef inline bint can_merge(const Bfc* table, const Chunk* a, const Chunk* b) noexcept nogil:
    # A mark may spread over memory that is free for everyone, never over another stream's.
    if a.lane == b.lane:
        return True
    if not table.merge_released:
        return False
    return is_settled(table, a) or is_settled(table, b)


cdef inline bint is_settled(const Bfc* table, const Chunk* chunk) noexcept nogil:
    return chunk.lane == LANE_RELEASED or chunk.epoch <= table.lanes[chunk.lane].settled


cdef inline uint32_t chunk_merge_next(Bfc* table, uint32_t index) noexcept nogil:
    cdef uint32_t other = table.chunks[index].next
    if other != NIL and state_of(table, other) == CHUNK_FREE:
        if can_merge(table, &table.chunks[index], &table.chunks[other]):
            bin_remove(table, other)
            chunk_absorb(table, index, other)
    return index


cdef inline uint32_t chunk_merge_prev(Bfc* table, uint32_t index) noexcept nogil:
    cdef uint32_t other = table.chunks[index].prev
    if other != NIL and state_of(table, other) == CHUNK_FREE:
        if can_merge(table, &table.chunks[index], &table.chunks[other]):
            bin_remove(table, other)
            chunk_absorb(table, other, index)
            return other
    return index


cdef void chunk_absorb(Bfc* table, uint32_t index, uint32_t other) noexcept nogil:
    # `other` follows `index`; both are free and in no bin. The stricter mark survives.
    cdef Chunk* low = &table.chunks[index]
    cdef Chunk* high = &table.chunks[other]
    if low.lane == high.lane:
        if high.epoch > low.epoch:
            low.epoch = high.epoch
    elif is_settled(table, low):
        low.lane = high.lane
        low.epoch = high.epoch
    low.size += high.size
    low.next = high.next
    if high.next != NIL:
        table.chunks[high.next].prev = index
    slot_give(table, other)


# ---- slots of the chunk array ------------------------------------------------------------------

cdef inline bint slot_ready(Bfc* table) noexcept nogil:
    return table.unused != NIL or table.count < table.capacity or chunks_grow(table)


cdef bint slots_ready(Bfc* table, uint32_t count) noexcept nogil:
    # Counted against fresh slots alone: recycled ones come on top.
    while table.capacity - table.count < count:
        if not chunks_grow(table):
            return False
    return True


cdef bint chunks_grow(Bfc* table) noexcept nogil:
    cdef uint32_t capacity = table.capacity * 2 if table.capacity else 64
    if capacity > MAX_CHUNKS:
        return False
    if table.chunks == NULL:
        table.chunks = <Chunk*>reserved_open(<size_t>MAX_CHUNKS * sizeof(Chunk))
    if (table.chunks == NULL
            or reserved_commit(table.chunks, <size_t>capacity * sizeof(Chunk)) != 0):
        return False
    table.capacity = capacity
    return True


cdef uint32_t slot_take(Bfc* table) noexcept nogil:
    cdef uint32_t index = table.unused
    if index != NIL:
        table.unused = table.chunks[index].next
        return index
    index = table.count
    store32(&table.count, index + 1)
    return index


cdef inline void slot_give(Bfc* table, uint32_t index) noexcept nogil:
    # The generation stays: a handle to the old tenant must not fit the next one.
    table.chunks[index].state = CHUNK_UNUSED
    table.chunks[index].next = table.unused
    table.unused = index


# ---- regions and lanes -------------------------------------------------------------------------

cdef int bfc_init(Bfc* table, SplitRule split_rule, uint64_t max_dead) noexcept nogil:
    cdef uint32_t lane
    memset(table, 0, sizeof(Bfc))
    table.unused = NIL
    table.holes = NIL
    table.split_rule = split_rule
    table.max_dead = max_dead
    table.merge_released = True
    return bfc_add_lane(table, &lane)


cdef void bfc_free_all(Bfc* table) noexcept nogil:
    cdef uint32_t lane
    for lane in range(table.lane_count):
        free(table.lanes[lane])
    free(table.lanes)
    free(table.regions)
    reserved_close(table.chunks, <size_t>MAX_CHUNKS * sizeof(Chunk))
    memset(table, 0, sizeof(Bfc))
    table.unused = NIL
    table.holes = NIL


cdef int bfc_add_lane(Bfc* table, uint32_t* lane) noexcept nogil:
    cdef Lane** lanes = <Lane**>realloc(table.lanes, (table.lane_count + 1) * sizeof(Lane*))
    if lanes == NULL:
        return BFC_NO_METADATA
    table.lanes = lanes
    cdef Lane* fresh = <Lane*>calloc(1, sizeof(Lane))
    if fresh == NULL:
        return BFC_NO_METADATA
    memset(fresh.head, 0xFF, sizeof(fresh.head))
    lanes[table.lane_count] = fresh
    lane[0] = table.lane_count
    table.lane_count += 1
    return BFC_OK


cdef int bfc_add_region(Bfc* table, uint64_t address, uint64_t size, bint persistent,
                        uint32_t* region) noexcept nogil:
    cdef uint32_t slot, index
    if not region_slot_ready(table, &slot) or not slot_ready(table):
        return BFC_NO_METADATA
    index = slot_take(table)
    cdef Chunk* chunk = &table.chunks[index]
    chunk.address = address
    chunk.size = size
    chunk.requested = 0
    chunk.epoch = 0
    chunk.prev = NIL
    chunk.next = NIL
    chunk.region = slot
    chunk.lane = LANE_RELEASED
    chunk.state = CHUNK_FREE
    cdef Region* fresh = &table.regions[slot]
    fresh.address = address
    fresh.size = size
    fresh.first = index
    fresh.used = 0
    fresh.id = table.next_region_id
    fresh.persistent = persistent
    fresh.is_range = False
    table.next_region_id += 1
    table.regions_live += 1
    table.reserved += size
    if persistent:
        chunk.bin_prev = NIL
        chunk.bin_next = NIL
    else:
        bin_insert(table, index)
    region[0] = slot
    return BFC_OK


cdef bint region_slot_ready(Bfc* table, uint32_t* slot) noexcept nogil:
    cdef uint32_t i, capacity
    cdef Region* regions
    for i in range(table.region_count):
        if table.regions[i].size == 0:
            slot[0] = i
            return True
    if table.region_count == table.region_capacity:
        capacity = table.region_capacity * 2 if table.region_capacity else 8
        regions = <Region*>realloc(table.regions, <size_t>capacity * sizeof(Region))
        if regions == NULL:
            return False
        table.regions = regions
        table.region_capacity = capacity
    slot[0] = table.region_count
    table.regions[slot[0]].size = 0
    table.region_count += 1
    return True


cdef uint32_t bfc_take_persistent(Bfc* table, uint32_t region, uint64_t requested,
                                  uint32_t lane) noexcept nogil:
    cdef uint32_t index = table.regions[region].first
    chunk_use(table, index, requested, lane)
    return index


cdef bint bfc_region_is_idle(const Bfc* table, uint32_t region) noexcept nogil:
    return (table.regions[region].size != 0 and table.regions[region].used == 0
            and not table.regions[region].is_range)


cdef void bfc_remove_region(Bfc* table, uint32_t region) noexcept nogil:
    # All its chunks are free (not necessarily one: marks may keep neighbours apart).
    cdef Region* gone = &table.regions[region]
    cdef uint32_t index = gone.first
    cdef uint32_t next_index
    while index != NIL:
        next_index = table.chunks[index].next
        if not gone.persistent:
            bin_remove(table, index)
        slot_give(table, index)
        index = next_index
    table.reserved -= gone.size
    table.regions_live -= 1
    gone.size = 0


cdef void bfc_release_settled(Bfc* table, uint32_t lane, uint64_t settled) noexcept nogil:
    cdef uint32_t index
    cdef Chunk* chunk
    table.lanes[lane].settled = settled
    if table.lanes[lane].free_chunks == 0:
        return
    for index in range(table.count):
        chunk = &table.chunks[index]
        if (state_of(table, index) == CHUNK_FREE and chunk.lane == lane
                and chunk.epoch <= settled):
            bin_remove(table, index)
            chunk.lane = LANE_RELEASED
            chunk.epoch = 0
            bin_insert(table, chunk_merge_prev(table, chunk_merge_next(table, index)))


# ---- looking at it -----------------------------------------------------------------------------

cdef uint64_t bfc_largest_free(const Bfc* table) noexcept nogil:
    # The largest of the topmost filled bin of each lane; not on the fast path.
    cdef uint64_t largest = 0
    cdef uint32_t lane, level, index
    for lane in range(table.lane_count):
        if table.lanes[lane].levels == 0:
            continue
        level = <uint32_t>gm_high_bit64(table.lanes[lane].levels)
        index = table.lanes[lane].head[level][gm_high_bit64(table.lanes[lane].steps[level])]
        while index != NIL:
            if table.chunks[index].size > largest:
                largest = table.chunks[index].size
            index = table.chunks[index].bin_next
    return largest

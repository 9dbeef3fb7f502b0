"""Resources as columns of numbers, of which snapshots are made."""

import numpy as np

from libc.stdint cimport uint16_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport free

from gpumem._arena cimport Arena, GraphPool
from gpumem._buffer cimport (
    BlockLedger, ledger_copy_blocks, ledger_counters, ledger_drop, ledger_stream, LedgerBlock,
    LedgerCounters, MemoryResource,
)
from gpumem._native.arena.api cimport (
    arena_context, arena_copy, arena_copy_free, arena_drop, arena_heap, arena_is_paged,
    arena_parent, arena_retain_live, ArenaCopy, ArenaCore, block_note, BlockNote, DebugHeap,
    heap_copy, HEAP_FREED, HEAP_LIVE, HeapBlock, HeapState, hooks_blocks, STATE_ASLEEP, TableCopy,
)
from gpumem._native.bfc cimport (
    Chunk, CHUNK_CACHED, CHUNK_HOLE, CHUNK_PENDING_FREE, CHUNK_UNUSED, CHUNK_USED, NIL,
    SLOT_RELEASED,
)
from gpumem._native.driver cimport context_is_dead, DeviceContext
from gpumem._support.atomics cimport count_retain_live
from gpumem._support.columns cimport column_of
from gpumem._support.events cimport (
    event_sources_visit, EventSource, FRAMEWORK_VIRTUAL, OWNER_ARENA,
)
from gpumem._support.memory cimport array_reserve, require_memory
from gpumem._support.process cimport process
from gpumem.adaptors._adaptor cimport Adaptor
from gpumem._events.sources cimport find_source, source_of

from gpumem.errors import ClosedError


# The order is the number in `state`.
STATES = ("free", "used", "cached", "pending_free", "hole")

cdef enum State:
    FREE = 0
    USED = 1
    CACHED = 2
    PENDING_FREE = 3
    HOLE = 4

cdef packed struct BlockRow:
    uint64_t address
    uint64_t nbytes
    uint64_t allocated_nbytes
    uint64_t stream
    uint64_t generation         # differs between blocks at one address
    uint64_t number             # of the allocation in its recording
    uint64_t time               # ns, of the monotonic clock; 0: not recorded
    uint32_t region
    uint16_t thread
    uint16_t tag
    uint16_t stack
    uint8_t framework
    uint8_t state

BLOCK = np.dtype([
    ("address", "<u8"), ("nbytes", "<u8"), ("allocated_nbytes", "<u8"), ("stream", "<u8"),
    ("generation", "<u8"), ("number", "<u8"), ("time", "<u8"), ("region", "<u4"),
    ("thread", "<u2"), ("tag", "<u2"), ("stack", "<u2"), ("framework", "u1"), ("state", "u1"),
])
REGION = np.dtype([("address", "<u8"), ("nbytes", "<u8"), ("kind", "u1")])
PAGE = np.dtype([("address", "<u8"), ("nbytes", "<u8")])

# The order is the number in `kind`.
REGION_KINDS = ("region", "persistent", "range", "virtual")


# ---- list of resources ---------------------------------------------------------------------------

cdef struct Found:
    EventSource* sources
    uint32_t count
    uint32_t capacity
    bint failed


cdef void collect(EventSource* source, void* context) noexcept nogil:
    # Runs under the lock that the end of a resource takes first, so the owner still exists.
    cdef Found* found = <Found*>context
    if not array_reserve(<void**>&found.sources, &found.capacity, found.count + 1, 64,
                         sizeof(EventSource)):
        found.failed = True
        return
    if source.owner_is == OWNER_ARENA:
        if not arena_retain_live(<ArenaCore*>source.owner):
            return
    elif not count_retain_live(&(<BlockLedger*>source.owner).references):
        return
    found.sources[found.count] = source[0]
    found.count += 1


def all_of_them():
    """Describe every live resource of this process, the oldest first; see `describe`."""
    cdef Found found
    cdef uint32_t i
    found.sources = NULL
    found.count = 0
    found.capacity = 0
    found.failed = False
    event_sources_visit(collect, &found)
    try:
        if found.failed:
            raise MemoryError("out of host memory while listing resources")
        return [describe_source(&found.sources[i]) for i in reversed(range(found.count))]
    finally:
        for i in range(found.count):
            drop_owner(&found.sources[i])
        free(found.sources)


cdef void drop_owner(const EventSource* source) noexcept:
    if source.owner_is == OWNER_ARENA:
        arena_drop(<ArenaCore*>source.owner)
    else:
        with nogil:
            ledger_drop(<BlockLedger*>source.owner)     # it may end a driver's pool


def describe(resource):
    """Describe a resource by a dict of plain values and columns.

    Keys: ``key`` (its identity), ``name``, ``kind``, ``memory``, ``parent`` (a key),
    ``upstreams`` (keys), ``source`` (a key), ``backing``, ``limit``, ``counts``, ``regions``,
    ``pages``, ``records`` (arrays of REGION, PAGE, BLOCK) and ``held`` (ns).

    Raises
    ------
    TypeError
        It is not a resource of gpumem's, or was never initialised.
    ClosedError
        It belongs to the parent of a fork.
    """
    require_own(resource)
    if isinstance(resource, Adaptor) and (<Adaptor>resource).upstreams is not None:
        return describe_adaptor(resource)
    return describe_source(source_of(resource))


def parts_of(resource):
    """Return the arenas that hold the blocks of a resource's tags, without its own."""
    if isinstance(resource, GraphPool):
        return (<GraphPool>resource).members()[1:]
    return resource._tag_arenas() if isinstance(resource, Arena) else []


cdef int require_own(resource) except -1:
    cdef DeviceContext* context = NULL
    if isinstance(resource, GraphPool) and (<GraphPool>resource).core != NULL:
        context = arena_context((<GraphPool>resource).core)
    elif isinstance(resource,
                    MemoryResource) and (<MemoryResource>resource).driver_device is not None:
        context = &(<MemoryResource>resource).driver_device.context
    if context != NULL and context.generation != process.generation:
        raise ClosedError(f"{resource!r} belongs to the parent process")
    return 0


def key_of(resource):
    """Return the key of a resource in `describe`."""
    cdef EventSource* source = find_source(resource)
    # An adaptor's events are its upstream's.
    return id(resource) if source == NULL or source.owner == NULL else <uintptr_t>source.owner


cdef dict describe_source(const EventSource* source):
    if source.owner_is == OWNER_ARENA:
        found = describe_arena(<ArenaCore*>source.owner)
    else:
        found = describe_ledger(<BlockLedger*>source.owner)
    found["key"] = <uintptr_t>source.owner
    found["name"] = (<bytes>source.name).decode("utf-8", "replace")
    found["kind"] = (<bytes>source.kind).decode()
    found["memory"] = (<bytes>source.memory).decode()
    if source.upstream_owner != NULL:
        found["source"] = <uintptr_t>source.upstream_owner
    return found


cdef dict described(dict counts, blocks):
    return {"parent": None, "upstreams": (), "source": None, "backing": None, "limit": 0,
            "counts": counts, "regions": np.empty(0, REGION),
            "pages": np.empty(0, PAGE), "records": blocks,
            "held": 0}


# ---- arenas --------------------------------------------------------------------------------------

cdef dict describe_arena(ArenaCore* arena):
    cdef ArenaCopy copy
    cdef bint copied
    with nogil:
        copied = not context_is_dead(arena_context(arena)) and arena_copy(arena, &copy)
    if not copied:
        return described({}, np.empty(0, BLOCK))
    try:
        blocks = block_rows(arena, &copy)
        begins = blocks["address"].copy()
        freed = 0 if arena_heap(arena) == NULL else show_heap(arena_heap(arena), blocks, begins)
        note_frameworks(arena, blocks, begins)
        found = described(counts_of_copy(&copy, blocks), blocks)
        found["counts"]["num_frees"] += freed
        found["backing"] = "virtual" if arena_is_paged(arena) else "regions"
        found["limit"] = copy.limit
        found["regions"] = region_rows(&copy)
        found["pages"] = page_rows(&copy)
        found["held"] = copy.held
        if arena_parent(arena) != NULL:
            found["parent"] = <uintptr_t>arena_parent(arena)
        return found
    finally:
        arena_copy_free(&copy)


cdef object block_rows(const ArenaCore* arena, const ArenaCopy* copy):
    cdef uint32_t total = (count_chunks(&copy.tables[0]) + count_chunks(&copy.tables[1])
                           + copy.span_page_count)
    rows = np.zeros(total, BLOCK)
    cdef BlockRow* row = <BlockRow*>column_of(rows, total, sizeof(BlockRow), True)
    cdef uint32_t at
    with nogil:
        at = fill_rows(arena, copy, 0, 0, row, 0)
        at = fill_rows(arena, copy, 1, copy.tables[0].region_count, row, at)
        at = fill_span_rows(copy, row, at)
    return rows[:at]


cdef uint32_t count_chunks(const TableCopy* table) noexcept nogil:
    cdef uint32_t count = 0
    cdef uint32_t i
    for i in range(table.count):
        count += table.chunks[i].state != CHUNK_UNUSED
    return count


cdef uint32_t fill_rows(const ArenaCore* arena, const ArenaCopy* copy, bint small,
                        uint32_t first_region, BlockRow* rows, uint32_t at) noexcept nogil:
    # Rows are sorted by region, and by address within each.
    cdef const TableCopy* table = &copy.tables[small]
    cdef uint32_t region, index
    for region in range(table.region_count):
        index = NIL if table.regions[region].size == 0 else table.regions[region].first
        while index != NIL:
            fill_row(copy, &table.chunks[index], region + first_region, &rows[at])
            if rows[at].state == USED:
                add_note(arena, small, index, &rows[at])
            at += 1
            index = table.chunks[index].next
    return at


cdef uint32_t fill_span_rows(const ArenaCopy* copy, BlockRow* rows, uint32_t at) noexcept nogil:
    # A page in use of a virtual tensor is a block in a region of its own.
    cdef uint32_t first = copy.tables[0].region_count + copy.tables[1].region_count
    cdef uint32_t i
    for i in range(copy.span_page_count):
        rows[at].address = copy.span_pages[i].address
        rows[at].nbytes = rows[at].allocated_nbytes = copy.span_pages[i].nbytes
        rows[at].region = first + i
        rows[at].framework = FRAMEWORK_VIRTUAL
        rows[at].state = USED
        at += 1
    return at


cdef void fill_row(const ArenaCopy* copy, const Chunk* chunk, uint32_t region,
                   BlockRow* row) noexcept nogil:
    row.address = chunk.address
    row.allocated_nbytes = chunk.size
    row.region = region
    row.generation = chunk.generation
    row.state = state_of(chunk.state)
    if row.state == USED:
        row.nbytes = chunk.requested
    if row.state != HOLE and (row.state == USED or chunk.stream_slot != SLOT_RELEASED):
        row.stream = copy.streams[chunk.stream_slot]


cdef inline State state_of(uint32_t state) noexcept nogil:
    if state == CHUNK_USED:
        return USED
    if state == CHUNK_CACHED:
        return CACHED
    if state == CHUNK_PENDING_FREE:
        return PENDING_FREE
    return HOLE if state == CHUNK_HOLE else FREE


cdef inline void add_note(const ArenaCore* arena, bint small, uint32_t index,
                          BlockRow* row) noexcept nogil:
    cdef BlockNote note
    if not block_note(arena, small, index, <uint32_t>row.generation, &note):
        return
    row.number = note.number
    row.time = note.time
    row.framework = <uint8_t>(note.seal >> 8)
    row.thread = <uint16_t>(note.seal >> 16)
    row.tag = <uint16_t>(note.seal >> 32)
    row.stack = <uint16_t>(note.seal >> 48)


cdef uint64_t show_heap(DebugHeap* heap, blocks, begins) except? 0:
    # Turns the blocks of a debugged arena into those of its users, without guards; `begins` gets
    # their addresses. Blocks in quarantine are pending free while streams use them, then cached.
    # Returns the number of blocks in quarantine.
    cdef uint64_t count = 0
    cdef uint64_t i
    cdef HeapBlock* known = heap_copy(heap, True, &count)
    require_memory(known != NULL, "copying debug heap metadata")
    try:
        rows = np.array([(known[i].base, known[i].address, heap_state(known[i].state),
                          known[i].requested if known[i].state == HEAP_LIVE else 0)
                         for i in range(count)], np.uint64).reshape(-1, 4)
    finally:
        free(known)
    rows = rows[rows[:, 0].argsort()]
    place, hit = matched(rows[:, 0], blocks["address"])
    hit &= blocks["state"] == <int>USED
    begins[hit] = rows[place[hit], 1]
    blocks["state"][hit] = rows[place[hit], 2]
    blocks["nbytes"][hit] = rows[place[hit], 3]
    return int((blocks["state"][hit] != <int>USED).sum())


cdef inline State heap_state(HeapState state) noexcept:
    return USED if state == HEAP_LIVE else PENDING_FREE if state == HEAP_FREED else CACHED


cdef tuple matched(known, addresses):
    """Return the place of each address in sorted ones, and whether it is there."""
    if len(known) == 0:
        return np.zeros(len(addresses), np.intp), np.zeros(len(addresses), bool)
    place = np.minimum(np.searchsorted(known, addresses), len(known) - 1)
    return place, known[place] == addresses


cdef int note_frameworks(const ArenaCore* arena, blocks, begins) except -1:
    # Hooks know the library that allocated a block by its address, recorded or not.
    cdef uint64_t count = hooks_blocks(arena, NULL, NULL, 0) + 64
    addresses = np.empty(count, np.uint64)
    frameworks = np.empty(count, np.uint8)
    cdef uint64_t* at = <uint64_t*>column_of(addresses, count, sizeof(uint64_t), True)
    cdef uint8_t* who = <uint8_t*>column_of(frameworks, count, sizeof(uint8_t), True)
    count = min(hooks_blocks(arena, at, who, count), count)
    order = np.argsort(addresses[:count])
    place, hit = matched(addresses[:count][order], begins)
    hit &= blocks["state"] == <int>USED
    blocks["framework"][hit] = frameworks[:count][order][place[hit]]
    return 0


cdef dict counts_of_copy(const ArenaCopy* copy, blocks):
    free_, used, cached, pending_free, holes = [
        int(blocks["allocated_nbytes"][blocks["state"] == state].sum())
        for state in range(len(STATES))]
    of_free = blocks["allocated_nbytes"][blocks["state"] == <int>FREE]
    marked = blocks["allocated_nbytes"][(blocks["state"] == <int>FREE) & (blocks["stream"] != 0)]
    return {
        "in_use": used,
        "requested_in_use": int(blocks["nbytes"].sum()),
        "reserved": copy.reserved,
        "free": free_,
        "cached": cached,
        "pending_free": pending_free,
        "waiting": int(marked.sum()),
        "holes": holes,
        "largest_free": int(of_free.max(initial=0)),
        "max_in_use": max(copy.stats.max_in_use, used),
        "max_reserved": copy.stats.max_reserved,
        "num_allocs": copy.stats.num_allocs,
        "num_frees": copy.stats.num_frees,
        "asleep": copy.state == STATE_ASLEEP,
    }


cdef object region_rows(const ArenaCopy* copy):
    # The order is that of the numbers in `region` of blocks; an unused region has 0 bytes.
    cdef uint32_t table, i
    rows = []
    for table in range(2):
        for i in range(copy.tables[table].region_count):
            region = &copy.tables[table].regions[i]
            rows.append((region.address, region.size,
                         2 if region.is_range else 1 if region.persistent else 0))
    for i in range(copy.span_page_count):
        rows.append((copy.span_pages[i].address, copy.span_pages[i].nbytes, 3))
    return np.array(rows, REGION)


cdef object page_rows(const ArenaCopy* copy):
    cdef uint32_t i
    cdef uint32_t of_spans = 0 if copy.state == STATE_ASLEEP else copy.span_page_count
    rows = [(copy.pages[i].address, copy.pages[i].nbytes) for i in range(copy.page_count)]
    rows += [(copy.span_pages[i].address, copy.span_pages[i].nbytes) for i in range(of_spans)]
    return np.array(rows, PAGE)


# ---- others --------------------------------------------------------------------------------------

cdef dict describe_ledger(BlockLedger* ledger):
    cdef LedgerCounters now
    if context_is_dead(ledger.context):
        return described({}, np.empty(0, BLOCK))
    now = ledger_counters(ledger)
    return described({
        "in_use": now.in_use, "requested_in_use": now.requested,
        "reserved": now.in_use + now.waiting, "waiting": now.waiting,
        "max_in_use": now.max_in_use, "max_reserved": now.max_held,
        "num_allocs": now.num_allocs, "num_frees": now.num_frees,
    }, ledger_rows(ledger))


cdef object ledger_rows(BlockLedger* ledger):
    cdef uint64_t i, count = 0
    cdef BlockRow* view
    cdef LedgerBlock* block
    cdef char* blocks = ledger_copy_blocks(ledger, &count)
    require_memory(blocks != NULL, "copying a list of blocks")
    try:
        rows = np.zeros(count, BLOCK)
        view = <BlockRow*>column_of(rows, count, sizeof(BlockRow), True)
        for i in range(count):
            block = <LedgerBlock*>(blocks + i * ledger.block_size)
            view[i].address = block.base
            view[i].nbytes = block.requested
            view[i].allocated_nbytes = block.size
            view[i].generation = block.number
            view[i].state = USED
            if ledger.streams != NULL:
                view[i].stream = <uint64_t>ledger_stream(ledger, block.slot)
        return rows
    finally:
        free(blocks)


cdef dict describe_adaptor(Adaptor adaptor):
    current, blocks, peak, _, _, total = adaptor._counts()
    found = described({
        "in_use": current, "requested_in_use": current, "max_in_use": peak,
        "num_allocs": total, "num_frees": total - blocks,
    }, ledger_rows(adaptor.ledger))
    found["key"] = key_of(adaptor)
    found["name"] = adaptor.name
    found["kind"] = type(adaptor).__name__
    found["memory"] = str(adaptor.memory)
    found["upstreams"] = tuple(key_of(upstream) for upstream in adaptor.upstreams)
    return found

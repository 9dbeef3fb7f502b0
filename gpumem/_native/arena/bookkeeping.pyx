"""An arena's bookkeeping: charges, statistics, events of a recorder, and copies of its metadata."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from gpumem._native.arena.debug_heap.guards cimport heap_counts
from gpumem._native.arena.debug_heap.types cimport DebugHeap
from gpumem._native.arena.family cimport any_pool_next, tag_next
from gpumem._native.arena.thread_cache cimport (
    cache_flush, CacheCounts, caches_counts, caches_flush, caches_hold, caches_thaw,
)
from gpumem._native.arena.types cimport (
    apart_bytes, apart_from, arena_extensions, arena_limit, arena_max_in_use, ARENA_OK,
    ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, arena_reserved, arena_reserved_now, arena_shrinkages,
    arena_state, ArenaCore, ArenaSpan, backing_calls, Block, BlockNote, family_held, family_level,
    family_limit, IN_SMALL, index_of, LARGE_SPACE, PERSISTENT_SPACE, root_of, SMALL_SPACE, SPACES,
    STATE_ASLEEP, table_of,
)
from gpumem._native.arena.values cimport HeapCounts
from gpumem._native.backing cimport Mapped
from gpumem._native.bfc cimport (
    Bfc, bfc_check, bfc_invariant, bfc_largest_free, BFC_OK, bfc_region_is_idle, bfc_resolve, Chunk,
    CHUNK_USED, NIL, Region, round_to_quantum, SLOT_RELEASED,
)
from gpumem._native.budget cimport (
    budget_admit, budget_drop, budget_load, budget_make, budget_refusing, budget_rename,
    budget_room, budget_uncharge, BUDGET_UNLIMITED, BudgetCore,
)
from gpumem._native.pages cimport (
    address_of, bytes_of, GRANULE_BITS, Page, pages_check, pages_invariant, Space, span_page_at,
    span_page_bytes, span_page_in_use,
)
from gpumem._support.atomics cimport (
    load32, load64, load8, peak_try, pointer_try, publish32, published64, store64, version_begin,
    version_of,
)
from gpumem._support.clock cimport clock_ns
from gpumem._support.events cimport (
    event_source_note, is_recorded, REC_ALLOC, REC_FREE, RecEvent, RecNoted,
)
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.memory cimport reserved_close, reserved_commit, reserved_open


cdef enum:
    OF_LEVEL = 60       # the invariant's number; lower ones are of the tables and of the pages


cdef extern from *:
    """
    #include <stdio.h>
    #include <stdlib.h>
    static inline void gm_panic(const char *invariant) {
        fprintf(stderr, "gpumem: internal error: arena invariant violated: %s\\n",
                invariant);
        abort();
    }
    """
    void gm_panic(const char* invariant) noexcept nogil


cdef void note_reserved(ArenaCore* arena) noexcept nogil:
    cdef uint64_t reserved = arena_reserved(arena) + arena.spanned
    if reserved > arena.stats.max_reserved:
        arena.stats.max_reserved = reserved


cdef void require_sound(const ArenaCore* arena) noexcept nogil:
    # In debug builds only: stops at the operation that broke an invariant.
    cdef int broken = check_tables(arena, False)
    if broken:
        gm_panic(invariant_text(broken))


cdef int check_tables(const ArenaCore* arena, bint folded) noexcept nogil:
    cdef int broken = bfc_check(&arena.table, folded)
    cdef int i
    if broken == 0:
        broken = bfc_check(&arena.small, folded)
    if broken == 0:
        broken = bfc_check(&arena.persistent, folded)
    for i in range(SPACES):
        if broken == 0 and arena.settings.paged:
            broken = pages_check(&arena.spaces[i])
    return broken


cdef int check_level(const ArenaCore* arena) noexcept nogil:
    return OF_LEVEL if budget_load(&arena.level.used) != arena_held(arena) else 0


cdef const char* invariant_text(int number) noexcept nogil:
    if number == OF_LEVEL:
        return "the bytes charged to the arena's level are those that it holds"
    return bfc_invariant(number) if number < 40 else pages_invariant(number)


# ---- bytes held ----------------------------------------------------------------------------------

cdef bint arena_level_init(ArenaCore* arena) noexcept nogil:
    cdef uint64_t limit = arena.settings.max_mem or BUDGET_UNLIMITED
    cdef BudgetCore* family = budget_make(NULL, b"", limit, BUDGET_UNLIMITED, True)
    if family == NULL:
        return False
    arena.level = budget_make(family, b"", BUDGET_UNLIMITED, BUDGET_UNLIMITED, True)
    budget_drop(family)         # the level has a reference
    return arena.level != NULL


cdef bint arena_join_as(ArenaCore* pool, const ArenaCore* arena) noexcept nogil:
    cdef const BudgetCore* counted = arena.in_use_level
    pool.events.budget = arena.events.budget
    if counted != NULL:
        pool.in_use_level = budget_make(counted.parent, counted.name, BUDGET_UNLIMITED,
                                        BUDGET_UNLIMITED, True)
        pool.detour += 1
        if pool.in_use_level == NULL:
            return False
    return budget_rename(pool.level, arena.level.name)


cdef int arena_charge(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef const BudgetCore* refusing
    while nbytes and not budget_admit(arena.level, nbytes):
        refusing = budget_refusing(arena.level, nbytes)
        # NULL: another thread's charge was in the way and has been rolled back.
        if refusing == family_level(arena):
            return ARENA_OVER_LIMIT
        if refusing != NULL:
            return refuse_budget(arena, nbytes)
    return ARENA_OK


cdef int arena_charge_region(ArenaCore* arena, uint64_t size, uint64_t* wanted) noexcept nogil:
    # Other arenas charge the same levels: the room may shrink before the charge.
    cdef int status = arena_charge(arena, wanted[0])
    cdef uint64_t less
    while status != ARENA_OK and wanted[0] != size:
        less = min(budget_room(arena.level), wanted[0] - arena.backing.granule)
        wanted[0] = max(size, less & ~(arena.backing.granule - 1))
        status = arena_charge(arena, wanted[0])
    return status


cdef int arena_charge_pages(ArenaCore* arena, uint64_t created, uint64_t released) noexcept nogil:
    cdef uint64_t exchanged = min(created, released)
    cdef BudgetCore* budget = family_level(arena).parent
    cdef int status
    if exchanged and budget != NULL and not budget_admit(budget, exchanged):
        return refuse_budget(arena, created)
    status = arena_charge(arena, created - exchanged)
    if status != ARENA_OK:
        arena_refund_pages(arena, created, released)
    return status


cdef void arena_refund_pages(ArenaCore* arena, uint64_t created, uint64_t released) noexcept nogil:
    if created and released:
        budget_uncharge(family_level(arena).parent, min(created, released))


cdef int refuse_budget(ArenaCore* arena, uint64_t wanted) noexcept nogil:
    # Callers that know only the parent of a tag's arena read it there.
    store64(&arena.over_budget, wanted)
    if arena.parent != NULL:
        store64(&arena.parent.over_budget, wanted)
    return ARENA_OVER_BUDGET


cdef void arena_reconcile(ArenaCore* arena) noexcept nogil:
    # Only this arena charges its level, and the grow lock keeps `used` from rising.
    cdef uint64_t held = arena_held(arena)
    cdef uint64_t charged = budget_load(&arena.level.used)
    if charged > held:
        budget_uncharge(arena.level, charged - held)
    raise_held_peak(arena)


cdef void raise_held_peak(ArenaCore* arena) noexcept nogil:
    # The charges are an upper bound: another thread may have charged memory that the driver refuses
    # then.
    cdef uint64_t* held_peak = &(<ArenaCore*>root_of(arena)).held_peak
    cdef uint64_t peak = load64(held_peak)
    cdef uint64_t held = family_held(arena)
    if held > peak:
        held = min(held, family_reserved(arena))
    while held > peak and not peak_try(held_peak, &peak, held):
        pass


cdef uint64_t family_reserved(ArenaCore* arena) noexcept nogil:
    cdef uint64_t total = 0
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        total += arena_reserved_now(each)
        each = tag_next(arena, each)
    each = any_pool_next(arena, NULL)
    while each != NULL:
        total += arena_reserved_now(each)
        each = any_pool_next(arena, each)
    return total


cdef uint64_t arena_held(const ArenaCore* arena) noexcept nogil:
    # The tables of a sleeping arena have the bytes that it will hold again; its handles, those that
    # it holds now.
    cdef uint64_t held = apart_bytes(arena) + arena.spanned
    cdef const Mapped* region = arena.backing.mapped
    cdef const Space* space
    cdef uint32_t page
    cdef int i
    if arena_state(arena) != STATE_ASLEEP:
        return arena_reserved(arena) + arena.spanned
    for i in range(SPACES):
        space = &arena.spaces[i]
        for page in range(space.page_count):
            held += bytes_of(&space.page[page]) if space.page[page].memory else 0
    while region != NULL:
        held += region.nbytes if region.memory else 0
        region = region.next
    return held


# ---- bytes in use --------------------------------------------------------------------------------

cdef bint charge_request(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef uint64_t size = round_to_quantum(nbytes)
    return admit_in_use(arena, size, size)


cdef bint admit_in_use(ArenaCore* arena, uint64_t nbytes, uint64_t wanted) noexcept nogil:
    # `wanted`: the bytes that an error names if the budget refuses.
    if budget_admit(arena.in_use_level, nbytes):
        return True
    refuse_budget(arena, wanted)
    return False


cdef bint charge_padding(ArenaCore* arena, uint64_t nbytes, const Block* block) noexcept nogil:
    # A chunk is not split where the remainder would be too small.
    cdef uint64_t size = round_to_quantum(nbytes)
    return block.size <= size or admit_in_use(arena, block.size - size, block.size)


cdef bint padding_has_room(ArenaCore* arena, uint64_t size, uint64_t whole) noexcept nogil:
    if arena.in_use_level == NULL or whole - size <= budget_room(arena.in_use_level):
        return True
    refuse_budget(arena, whole)
    return False


cdef uint64_t counted_bytes(ArenaCore* arena, uint64_t handle) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index
    if (arena.in_use_level == NULL
            or bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK):
        return 0
    return table.chunks[index].size


cdef void count_out(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    if nbytes:
        budget_uncharge(arena.in_use_level, nbytes)


# ---- events, for the recorder attached to the arena's `events` -----------------------------------

# ---- blocks --------------------------------------------------------------------------------------

cdef void note_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        const Block* block) noexcept nogil:
    cdef RecNoted noted = note_event(arena, REC_ALLOC, block.address, nbytes, block.size,
                                     stream_slot, True)
    # No seal: sampling has left the allocation out, and no snapshot can refer to it.
    if noted.seal:
        remember(arena, block.handle, &noted)


cdef void note_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    cdef uint32_t index
    if bfc_resolve(table_of(arena, handle), handle & ~<uint64_t>IN_SMALL, &index) == BFC_OK:
        note_chunk(arena, REC_FREE, handle, stream_slot, True)


cdef void note_chunk(ArenaCore* arena, uint32_t kind, uint64_t handle, uint32_t stream_slot,
                     bint may_wait) noexcept nogil:
    cdef const Chunk* chunk = &table_of(arena, handle).chunks[index_of(handle)]
    cdef bint used = load8(&chunk.state) == CHUNK_USED
    note_event(arena, kind, chunk.address, chunk.requested if used else 0, chunk.size, stream_slot,
               may_wait)


cdef RecNoted note_event(ArenaCore* arena, uint32_t kind, uint64_t address, uint64_t nbytes,
                         uint64_t block, uint32_t stream_slot, bint may_wait) noexcept nogil:
    cdef RecEvent event = RecEvent(kind, address, nbytes, block,
                                   <uint64_t>arena.streams[stream_slot].handle)
    cdef RecNoted noted
    event_source_note(&arena.events, &event, may_wait, &noted)
    return noted


# ---- memory --------------------------------------------------------------------------------------

cdef void note_region(ArenaCore* arena, uint32_t kind, uint64_t address,
                      uint64_t nbytes) noexcept nogil:
    if is_recorded(&arena.events) and (
            not arena.settings.paged or apart_from(arena, address) != NULL):
        # Slot 0: memory belongs to no stream. It does not wait, because a lock is held.
        note_event(arena, kind, address, nbytes, nbytes, SLOT_RELEASED, False)


# ---- by chunk ------------------------------------------------------------------------------------

cdef void remember(ArenaCore* arena, uint64_t handle, const RecNoted* noted) noexcept nogil:
    # Only the thread that has just allocated the block writes here, until the block is freed.
    cdef BlockNote* notes = notes_of(arena, (handle & IN_SMALL) != 0)
    cdef BlockNote* at
    if notes == NULL:
        return
    at = &notes[index_of(handle)]
    # Generation 0 while the other fields are written: a reader without the lock then takes none.
    version_begin(&at.generation)
    at.number = noted.number
    at.time = noted.time
    at.seal = noted.seal
    at.recorder = <uint32_t>noted.recorder
    publish32(&at.generation, <uint32_t>(handle >> 32))


cdef BlockNote* notes_of(ArenaCore* arena, bint small) noexcept nogil:
    # Reserves addresses for every possible chunk; the first touch of a page allocates its memory.
    cdef size_t nbytes = notes_bytes(arena, small)
    cdef BlockNote* notes = arena.notes[small]
    if notes != NULL:
        return notes
    notes = <BlockNote*>reserved_open(nbytes)
    if notes == NULL:
        return NULL
    if (reserved_commit(notes, nbytes) != 0
            or not pointer_try(<void**>&arena.notes[small], NULL, notes)):
        # Another thread was first, or the kernel refused: this array is not used.
        reserved_close(notes, nbytes)
    return arena.notes[small]


cdef inline size_t notes_bytes(const ArenaCore* arena, bint small) noexcept nogil:
    cdef const Bfc* table = &arena.small if small else &arena.table
    return <size_t>table.max_chunks * sizeof(BlockNote)


cdef bint block_note(const ArenaCore* arena, bint small, uint32_t index, uint32_t generation,
                     BlockNote* note) noexcept nogil:
    cdef const BlockNote* at
    if arena.notes[small] == NULL:
        return False
    at = &arena.notes[small][index]
    if version_of(&at.generation) != generation or generation == 0:
        return False
    # Compared again after the copy: the chunk may have been allocated anew during it.
    note[0] = at[0]
    return version_of(&at.generation) == generation


cdef void notes_free(ArenaCore* arena) noexcept nogil:
    cdef uint32_t i
    for i in range(2):
        reserved_close(arena.notes[i], notes_bytes(arena, i))
        arena.notes[i] = NULL


# ---- copies of the metadata ----------------------------------------------------------------------

cdef enum:
    SPARE = 1024                # further entries, for those that are added during the copy


cdef bint arena_copy(ArenaCore* arena, ArenaCopy* copy) noexcept nogil:
    cdef ArenaCopy room
    cdef uint64_t begin
    cdef bint enough = False
    memset(copy, 0, sizeof(ArenaCopy))
    while not enough:
        arena_copy_free(copy)
        if not make_room(arena, copy):
            arena_copy_free(copy)
            return False
        # Copying overwrites the counts of the room with those of the arena.
        room = copy[0]
        begin = clock_ns()
        # Held, not flushed: a copy shows which blocks are cached.
        caches_hold(arena)
        lock_acquire(&arena.lock)
        enough = fits(arena, &room)
        # Otherwise the arena has outgrown the room: begin anew with its new counts.
        if enough:
            copy_metadata(arena, copy)
        lock_release(&arena.lock)
        caches_thaw(arena)
        copy.held = clock_ns() - begin
    return True


cdef void arena_copy_free(ArenaCopy* copy) noexcept nogil:
    cdef uint32_t i
    for i in range(2):
        free(copy.tables[i].chunks)
        free(copy.tables[i].regions)
    free(copy.pages)
    free(copy.span_pages)
    free(copy.streams)
    memset(copy, 0, sizeof(ArenaCopy))


# ---- room ----------------------------------------------------------------------------------------

cdef bint make_room(ArenaCore* arena, ArenaCopy* copy) noexcept nogil:
    # Memory is made without the lock: the counts are those of a moment ago, and bound what can be
    # copied.
    lock_acquire(&arena.lock)
    count_table(&arena.table, &copy.tables[0])
    count_table(&arena.small, &copy.tables[1])
    copy.page_count = page_slots(arena) + SPARE
    copy.span_page_count = span_page_slots(arena) + SPARE
    copy.stream_count = arena.table.stream_slot_count + SPARE
    lock_release(&arena.lock)
    copy.pages = <PageCopy*>touched(<size_t>copy.page_count * sizeof(PageCopy))
    copy.span_pages = <PageCopy*>touched(<size_t>copy.span_page_count * sizeof(PageCopy))
    copy.streams = <uint64_t*>touched(<size_t>copy.stream_count * sizeof(uint64_t))
    return (room_for_table(&copy.tables[0]) and room_for_table(&copy.tables[1])
            and copy.pages != NULL and copy.span_pages != NULL and copy.streams != NULL)


cdef void count_table(const Bfc* table, TableCopy* copy) noexcept nogil:
    copy.count = table.count + SPARE
    copy.region_count = table.region_count + SPARE


cdef bint room_for_table(TableCopy* copy) noexcept nogil:
    copy.chunks = <Chunk*>touched(<size_t>copy.count * sizeof(Chunk))
    copy.regions = <Region*>touched(<size_t>copy.region_count * sizeof(Region))
    return copy.chunks != NULL and copy.regions != NULL


cdef void* touched(size_t nbytes) noexcept nogil:
    # Written once here, so that no page fault happens while the locks are held.
    cdef void* memory = malloc(nbytes)
    if memory != NULL:
        memset(memory, 0, nbytes)
    return memory


cdef uint32_t page_slots(const ArenaCore* arena) noexcept nogil:
    cdef uint32_t slots = 0
    cdef int i
    for i in range(SPACES):
        slots += arena.spaces[i].page_count
    return slots


cdef uint32_t span_page_slots(const ArenaCore* arena) noexcept nogil:
    cdef uint32_t slots = 0
    cdef const ArenaSpan* span = arena.spans
    while span != NULL:
        slots += span.pages.count
        span = span.next
    return slots


cdef bint fits(const ArenaCore* arena, const ArenaCopy* room) noexcept nogil:
    return (arena.table.count <= room.tables[0].count
            and arena.small.count <= room.tables[1].count
            and arena.table.region_count <= room.tables[0].region_count
            and arena.small.region_count <= room.tables[1].region_count
            and page_slots(arena) <= room.page_count
            and span_page_slots(arena) <= room.span_page_count
            and arena.table.stream_slot_count <= room.stream_count)


# ---- the copy, with every lock -------------------------------------------------------------------

cdef void copy_metadata(const ArenaCore* arena, ArenaCopy* copy) noexcept nogil:
    cdef CacheCounts cached
    cdef uint32_t i
    cdef int space
    copy_table(&arena.table, &copy.tables[0])
    copy_table(&arena.small, &copy.tables[1])
    copy.page_count = 0
    for space in range(SPACES if arena_state(arena) != STATE_ASLEEP else 0):
        copy_pages(&arena.spaces[space], copy)
    copy_span_pages(arena, copy)
    copy.stream_count = arena.table.stream_slot_count
    for i in range(copy.stream_count):
        copy.streams[i] = <uint64_t>arena.streams[i].handle
    copy.stats = arena.stats
    copy.stats.max_in_use = arena_max_in_use(arena)
    # Caches are held, so that their counts stand still.
    cached = caches_counts(arena)
    copy.stats.num_allocs += cached.allocs
    copy.stats.num_frees += cached.frees
    copy.reserved = arena_reserved_now(arena)
    copy.persistent_free = arena.persistent.reserved - arena.persistent.in_use
    copy.limit = arena_limit(arena)
    copy.state = arena_state(arena)


cdef void copy_table(const Bfc* table, TableCopy* copy) noexcept nogil:
    cdef uint32_t i
    copy.count = table.count
    copy.region_count = table.region_count
    for i in range(table.count):
        chunk_copy(&table.chunks[i], &copy.chunks[i])
    # An empty table has no arrays: memcpy must not be given NULL.
    if table.region_count:
        memcpy(copy.regions, table.regions, <size_t>table.region_count * sizeof(Region))


cdef void chunk_copy(const Chunk* chunk, Chunk* copy) noexcept nogil:
    # Caller holds `lock`. Another thread that frees a block of this cache takes no lock: it writes
    # the links, the state and then the epoch; see cache_free_remote. A chunk that is copied as used
    # has no epoch in the place of what was requested.
    copy.epoch = published64(&chunk.epoch)
    copy.state = load8(&chunk.state)
    copy.address = chunk.address
    copy.size = chunk.size
    copy.prev = chunk.prev
    copy.next = chunk.next
    copy.bin_prev = load32(&chunk.bin_prev)
    copy.bin_next = load32(&chunk.bin_next)
    copy.stream_slot = chunk.stream_slot
    copy.generation = chunk.generation
    copy.persistent = chunk.persistent


cdef void copy_pages(const Space* space, ArenaCopy* copy) noexcept nogil:
    cdef const Page* page
    cdef uint32_t i
    for i in range(space.page_count):
        page = &space.page[i]
        # An unused slot, or a page that is being released.
        if page.granules == 0 or page.active == NIL:
            continue
        copy.pages[copy.page_count].address = address_of(space, page.active)
        copy.pages[copy.page_count].nbytes = <uint64_t>page.granules << GRANULE_BITS
        copy.page_count += 1


cdef void copy_span_pages(const ArenaCore* arena, ArenaCopy* copy) noexcept nogil:
    cdef const ArenaSpan* span = arena.spans
    cdef uint32_t i
    copy.span_page_count = 0
    while span != NULL:
        for i in range(span.pages.count):
            if span_page_in_use(&span.pages.page[i]):
                copy.span_pages[copy.span_page_count] = PageCopy(
                    span_page_at(&span.pages, i), span_page_bytes(&span.pages, i))
                copy.span_page_count += 1
        span = span.next


# ---- figures -------------------------------------------------------------------------------------

cdef void arena_add_figures(ArenaCore* arena, ArenaFigures* figures) noexcept nogil:
    cdef const Space* small = &arena.spaces[SMALL_SPACE]
    cdef uint64_t of_small = load64(&small.created) - load64(&small.released)
    cdef const Uses* freed
    cdef int part
    # A flush of other threads' caches would interrupt these threads: their cached bytes count as
    # far as they are published.
    cache_flush(arena)
    lock_acquire(&arena.lock)
    figures.reserved[1] += arena.small.reserved
    figures.reserved[0] += arena_reserved_now(arena) - arena.small.reserved
    figures.segments[1] += of_small
    figures.segments[0] += arena_extensions(arena) - arena_shrinkages(arena) - of_small
    add_idle(&arena.table, &figures.idle[0], &figures.idle_bytes[0])
    add_idle(&arena.small, &figures.idle[1], &figures.idle_bytes[1])
    # Caches hold small blocks.
    figures.idle_bytes[1 if arena.small_below else 0] += arena.cached_bytes
    freed = arena.pending_free
    while freed != NULL:
        part = 1 if freed.handle & IN_SMALL else 0
        figures.pending[part] += 1
        figures.pending_bytes[part] += (
            table_of(arena, freed.handle).chunks[index_of(freed.handle)].size)
        freed = freed.next
    lock_release(&arena.lock)
    figures.retries += load64(&arena.num_retries)
    figures.waits += load64(&arena.num_waits)
    figures.extensions += arena_extensions(arena)
    figures.shrinkages += arena_shrinkages(arena)


cdef void add_idle(const Bfc* table, uint64_t* pieces, uint64_t* nbytes) noexcept nogil:
    # Caller holds `lock`. A region without a used chunk is idle as a whole, so that it is no piece
    # between used blocks. A persistent region is in no bin.
    cdef uint32_t i
    for i in range(table.stream_slot_count):
        pieces[0] += table.bins[i].free_chunks
        nbytes[0] += table.bins[i].free_bytes
    for i in range(table.region_count):
        if not table.regions[i].persistent and bfc_region_is_idle(table, i):
            pieces[0] -= 1
            nbytes[0] -= table.regions[i].size


# ---- counters ------------------------------------------------------------------------------------


cdef void arena_counts(ArenaCore* arena, ArenaCounts* counts) noexcept nogil:
    # Cached blocks would hide free memory; under the lock the counts are of one moment.
    caches_flush(arena)
    lock_acquire(&arena.lock)
    if arena.heap != NULL:
        lock_acquire(&arena.heap.lock)
    arena_counts_now(arena, counts)
    if arena.heap != NULL:
        lock_release(&arena.heap.lock)
    counts.num_regions = regions_held(arena)
    counts.largest_free = max(bfc_largest_free(&arena.table), bfc_largest_free(&arena.small))
    lock_release(&arena.lock)


cdef void arena_counts_now(const ArenaCore* arena, ArenaCounts* counts) noexcept nogil:
    cdef const Space* large = &arena.spaces[LARGE_SPACE]
    cdef const Space* small = &arena.spaces[SMALL_SPACE]
    memset(counts, 0, sizeof(ArenaCounts))
    count_blocks(arena, counts)
    if arena.heap != NULL:
        subtract_quarantine(arena.heap, counts)
    counts.rows_in_use = load64(&arena.span_used)
    counts.in_use += counts.rows_in_use
    counts.requested_in_use += counts.rows_in_use
    counts.spanned = load64(&arena.spanned)
    counts.limit = arena_limit(arena)
    counts.reserved = arena_reserved_now(arena)
    counts.max_in_use = max(arena_max_in_use(arena), counts.in_use)
    counts.max_reserved = load64(&arena.stats.max_reserved)
    counts.num_reserves = load64(&arena.stats.num_reserves)
    counts.num_extensions = arena_extensions(arena)
    counts.num_shrinkages = arena_shrinkages(arena)
    counts.max_alloc_size = load64(&arena.stats.max_alloc_size)
    counts.pages_moved = load64(&large.moved) + load64(&small.moved)
    counts.moves_refused = load64(&large.spared) + load64(&small.spared)
    counts.asleep_bytes = load64(&arena.sleeper.nbytes)
    counts.kept_for_sleep = load64(&arena.sleeper.kept)
    counts.live_spans = load32(<const uint32_t*>&arena.live_spans)
    counts.graphs = load32(<const uint32_t*>&arena.graphs)
    counts.driver_calls = (backing_calls(arena) + load64(&arena.stats.events_recorded)
                           + load64(&arena.stats.events_asked)
                           + load64(&arena.stats.events_waited))


cdef void count_blocks(const ArenaCore* arena, ArenaCounts* counts) noexcept nogil:
    # The tables count cached blocks as used, and the arena does not know yet which blocks caches
    # served. The arena's own counts are read before the caches' parts of them: see move_count in
    # thread_cache. Sums of different moments: neither may wrap below zero.
    cdef uint64_t used = load64(&arena.table.in_use) + load64(&arena.small.in_use)
    cdef uint64_t requested = (load64(&arena.table.requested_in_use)
                               + load64(&arena.small.requested_in_use))
    cdef uint64_t allocs = published64(&arena.stats.num_allocs)
    cdef uint64_t frees = published64(&arena.stats.num_frees)
    cdef CacheCounts cached = caches_counts(arena)
    counts.num_allocs = allocs + cached.allocs
    counts.num_frees = frees + cached.frees
    counts.in_use = used - min(cached.nbytes, used)
    counts.requested_in_use = min(requested + cached.requested, counts.in_use)


cdef void subtract_quarantine(const DebugHeap* heap, ArenaCounts* counts) noexcept nogil:
    # Blocks in quarantine are in use for the arena, and free for its users.
    cdef HeapCounts known = heap_counts(heap)
    counts.in_use -= min(known.held_bytes, counts.in_use)
    counts.requested_in_use = min(known.live_bytes, counts.in_use)
    counts.num_frees += known.held


cdef FamilyCounts family_counts(const ArenaCore* arena) noexcept nogil:
    return FamilyCounts(family_limit(arena), family_held(arena),
                        load64(&root_of(arena).held_peak))


cdef uint64_t regions_held(const ArenaCore* arena) noexcept nogil:
    # Caller holds `lock`. All pages for ordinary blocks count as one region.
    cdef uint64_t held = arena.table.regions_live + arena.small.regions_live
    cdef const Space* space
    cdef bint paged = False
    cdef uint32_t i
    # Reserved ranges for pages are regions in the tables, too: they are subtracted here, for
    # LARGE_SPACE and SMALL_SPACE.
    for i in range(PERSISTENT_SPACE):
        space = &arena.spaces[i]
        held -= space.range_count
        paged = paged or space.physical != 0
    return held + paged

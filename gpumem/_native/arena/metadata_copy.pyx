"""Copies of an arena's metadata."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from gpumem._native.arena.thread_cache cimport cache_flush, caches_hold, caches_thaw
from gpumem._native.arena.types cimport (
    arena_extensions, arena_limit, arena_max_in_use, arena_reserved_now, arena_shrinkages,
    arena_state, ArenaCore, ArenaSpan, IN_SMALL, index_of, SMALL_SPACE, SPACES, STATE_ASLEEP,
    table_of, ThreadCache,
)
from gpumem._native.bfc cimport Bfc, bfc_region_is_idle, Chunk, NIL, Region
from gpumem._native.pages cimport (
    address_of, GRANULE_BITS, Page, Space, span_page_at, span_page_bytes, span_page_in_use,
)
from gpumem._support.atomics cimport load32, load64, load8, published64
from gpumem._support.clock cimport clock_ns
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport lock_acquire, lock_release


cdef enum:
    SPARE = 1024                # entries more than there are, for what is added meanwhile


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
        # Else the arena grew beyond the room meanwhile: begin anew with its new counts.
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
    return (room_for_table(&copy.tables[0]) and room_for_table(&copy.tables[1])
            and room_for_rest(copy))


cdef void count_table(const Bfc* table, TableCopy* copy) noexcept nogil:
    copy.count = table.count + SPARE
    copy.region_count = table.region_count + SPARE


cdef bint room_for_table(TableCopy* copy) noexcept nogil:
    copy.chunks = <Chunk*>touched(<size_t>copy.count * sizeof(Chunk))
    copy.regions = <Region*>touched(<size_t>copy.region_count * sizeof(Region))
    return copy.chunks != NULL and copy.regions != NULL


cdef bint room_for_rest(ArenaCopy* copy) noexcept nogil:
    copy.pages = <PageCopy*>touched(<size_t>copy.page_count * sizeof(PageCopy))
    copy.span_pages = <PageCopy*>touched(<size_t>copy.span_page_count * sizeof(PageCopy))
    copy.streams = <uint64_t*>touched(<size_t>copy.stream_count * sizeof(uint64_t))
    return copy.pages != NULL and copy.span_pages != NULL and copy.streams != NULL


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


# ---- with every lock -----------------------------------------------------------------------------

cdef void copy_metadata(const ArenaCore* arena, ArenaCopy* copy) noexcept nogil:
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
    add_unpublished(arena, copy)
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
    # With the arena lock. Another thread that frees a block of this cache takes no lock: it writes
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
    # The others' would interrupt their threads: what they have cached counts as far as they have
    # published it.
    cache_flush(arena)
    lock_acquire(&arena.lock)
    figures.reserved[1] += arena.small.reserved
    figures.reserved[0] += arena_reserved_now(arena) - arena.small.reserved
    figures.segments[1] += of_small
    figures.segments[0] += arena_extensions(arena) - arena_shrinkages(arena) - of_small
    add_idle(&arena.table, &figures.idle[0], &figures.idle_bytes[0])
    add_idle(&arena.small, &figures.idle[1], &figures.idle_bytes[1])
    # In threads' caches; of small blocks.
    figures.idle_bytes[1 if arena.small_below else 0] += arena.cached_bytes
    freed = arena.pending_free
    while freed != NULL:
        part = 1 if freed.handle & IN_SMALL else 0
        figures.pending[part] += 1
        figures.pending_bytes[part] += (
            table_of(arena, freed.handle).chunks[index_of(freed.handle)].size)
        freed = freed.next
    lock_release(&arena.lock)


cdef void add_idle(const Bfc* table, uint64_t* pieces, uint64_t* nbytes) noexcept nogil:
    # With the lock. A region without a used chunk is idle as a whole: no piece of what is in use. A
    # persistent one is in no bin.
    cdef uint32_t i
    for i in range(table.stream_slot_count):
        pieces[0] += table.bins[i].free_chunks
        nbytes[0] += table.bins[i].free_bytes
    for i in range(table.region_count):
        if not table.regions[i].persistent and bfc_region_is_idle(table, i):
            pieces[0] -= 1
            nbytes[0] -= table.regions[i].size


cdef void add_unpublished(const ArenaCore* arena, ArenaCopy* copy) noexcept nogil:
    # Caches are held, so their counts stand still.
    cdef const ThreadCache* cache = arena.caches
    while cache != NULL:
        copy.stats.num_allocs += cache.allocs
        copy.stats.num_frees += cache.frees
        cache = cache.next

"""Figures of an arena, copied under its locks: counters, blocks, sums by state and owner.

They are plain values; `reports.py` makes objects of them.
"""

from libc.stdint cimport uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free, qsort

from gpumem._arena.arena cimport Arena
from gpumem._native.arena.api cimport (
    APART_SHAREABLE, APART_TRANSPORT, arena_context, arena_copy, arena_copy_blocks, arena_copy_free,
    arena_counts, arena_counts_now, arena_events, arena_find_apart, arena_heap, arena_held_by_pools,
    arena_in_use, arena_parent, arena_reserved, arena_rows_in_use, arena_sleeping_bytes,
    arena_state, arena_stream_count, arena_stream_handle, arena_stream_refusal, ArenaCopy,
    ArenaCore, ArenaCounts, block_note, BlockCopy, BlockNote, family_held, family_limit, heap_copy,
    HEAP_LIVE, HeapBlock, hooks_bytes, PageCopy, STATE_ASLEEP, tag_next,
)
from gpumem._native.backing cimport Mapped
from gpumem._native.bfc cimport (
    Chunk, CHUNK_CACHED, CHUNK_FREE, CHUNK_PENDING_FREE, CHUNK_USED, SLOT_RELEASED,
)
from gpumem._native.driver cimport CUDA_SUCCESS, CUresult, error_name

from gpumem._support.events import FRAMEWORKS, label_texts


# ---- counters ------------------------------------------------------------------------------------


cdef dict counters_of(Arena arena):
    cdef ArenaCounts counts
    cdef dict found
    arena_counts(arena.core, &counts)
    found = counts
    found["virtual"] = found.pop("spanned")
    return found


cdef uint64_t virtual_in_use(ArenaCore* arena) noexcept nogil:
    # With those of its tags.
    cdef uint64_t total = 0
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        total += arena_rows_in_use(each)
        each = tag_next(arena, each)
    return total


# ---- blocks --------------------------------------------------------------------------------------


cdef list rows_of(Arena arena):
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef BlockCopy* copies = arena_copy_blocks(arena.core, &count)
    if copies == NULL:
        raise MemoryError("out of host memory while copying arena metadata")
    try:
        return sorted([row_of(arena.core, &copies[i]) for i in range(count)])
    finally:
        free(copies)


cdef tuple row_of(ArenaCore* core, const BlockCopy* copy):
    cdef const Chunk* chunk = &copy.chunk
    cdef bint used = chunk.state == CHUNK_USED
    cdef bint pending_free = chunk.state == CHUNK_PENDING_FREE
    stream = 0
    # A released chunk belongs to any stream: 0.
    if used or chunk.stream_slot != SLOT_RELEASED:
        stream = <uintptr_t>arena_stream_handle(core, chunk.stream_slot)
    return (chunk.address, chunk.requested if used else 0, chunk.size, used, copy.region, stream,
            pending_free)


cdef dict heap_blocks_of(Arena arena):
    cdef uint64_t count = 0
    cdef uint64_t i
    cdef HeapBlock* known
    if arena_heap(arena.core) == NULL:
        return {}
    known = heap_copy(arena_heap(arena.core), True, &count)
    if known == NULL:
        raise MemoryError("out of host memory while copying a debug heap's metadata")
    try:
        return {known[i].base: (known[i].requested, known[i].state == HEAP_LIVE)
                for i in range(count)}
    finally:
        free(known)


cdef bint find_apart(Arena arena, int kind, uint64_t address, Mapped* memory) noexcept:
    cdef bint found
    with nogil:
        found = arena_find_apart(arena.core, kind, address, memory)
    return found


cdef bint is_apart_as(Arena arena, int kind, uint64_t address) noexcept:
    cdef Mapped memory
    return find_apart(arena, kind, address, &memory)


cdef bint is_apart(Arena arena, uint64_t address) noexcept:
    return (is_apart_as(arena, APART_SHAREABLE, address)
            or is_apart_as(arena, APART_TRANSPORT, address))


# ---- sums by state and owner ---------------------------------------------------------------------


cdef enum:
    TAGS = 65536
    MAX_FRAMEWORKS = 256

cdef struct Sums:
    uint32_t stream_slot                        # of the requesting stream
    uint64_t in_use
    uint64_t free
    uint64_t cached
    uint64_t pending_free
    uint64_t waiting
    uint64_t movable
    uint64_t largest_free
    uint64_t* by_tag                            # TAGS
    uint64_t untagged[MAX_FRAMEWORKS]           # recorded without a tag, by framework
    uint64_t noted[MAX_FRAMEWORKS]              # recorded, by framework
    uint64_t through_hooks[MAX_FRAMEWORKS]      # requested bytes of callers of hooks, by framework


cdef dict refusal_figures(Arena arena, uint32_t slot):
    cdef ArenaCore* core = arena.core
    return {"stream": <uintptr_t>arena_stream_handle(core, slot),
            "limit": family_limit(core), "held": family_held(core),
            "refused_streams": refused_streams(core), "memory": family_memory_of(core, slot)}


cdef tuple refused_streams(ArenaCore* arena):
    # In all tags: handles that freed memory waits for, and why the driver recorded no event there.
    cdef ArenaCore* each = tag_next(arena, NULL)
    cdef CUresult refusal
    cdef uint32_t slot
    found = {}
    while each != NULL:
        for slot in range(1, arena_stream_count(each)):
            refusal = arena_stream_refusal(each, slot)
            if refusal != CUDA_SUCCESS:
                handle = <uintptr_t>arena_stream_handle(each, slot)
                found[handle] = error_name(arena_context(each).table, refusal)
        each = tag_next(arena, each)
    return tuple(sorted(found.items()))


cdef dict family_memory_of(ArenaCore* arena, uint32_t slot):
    """Add up the arena's memory and that of its tags, and its sleeping bytes by tag."""
    from gpumem._arena import reports
    total = {} if arena_state(arena) == STATE_ASLEEP else memory_of(arena, slot)
    if total is None:           # out of host memory: the figures that need no copy
        return {"in_use": arena_in_use(arena), "reserved": arena_reserved(arena)}
    root = arena_name(arena if arena_parent(arena) == NULL else arena_parent(arena))
    asleep = {}
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        tag = arena_name(each)[len(root):].removeprefix(", tag ") or "default"
        if arena_state(each) == STATE_ASLEEP:
            asleep[tag] = arena_sleeping_bytes(each)
        elif each != arena:
            # Memory that is free on its streams serves no stream of this one.
            reports.add_memory(total, memory_of(each, SLOT_RELEASED) or {}, tag)
        each = tag_next(arena, each)
    return {**total, "asleep": asleep, "graph_pools": arena_held_by_pools(arena)}


cdef str arena_name(ArenaCore* arena):
    return (<bytes>arena_events(arena).name).decode("utf-8", "replace")


cdef dict memory_of(ArenaCore* arena, uint32_t slot):
    # Sums in bytes as the stream of `slot` sees them. None: out of host memory.
    cdef ArenaCopy copy
    cdef ArenaCounts counts
    cdef Sums* sums = <Sums*>calloc(1, sizeof(Sums))
    cdef bint done = False
    if sums == NULL:
        return None
    sums.stream_slot = slot
    # 512 KiB: too large for the stack.
    sums.by_tag = <uint64_t*>calloc(TAGS, sizeof(uint64_t))
    try:
        if sums.by_tag != NULL:
            with nogil:
                done = arena_copy(arena, &copy)
                if done:
                    sum_up(arena, &copy, sums)
        if not done:
            return None
        arena_counts_now(arena, &counts)
        found = described(sums, arena_rows_in_use(arena))
        found["reserved"] = copy.reserved
        found["free"] += counts.spanned - min(arena_rows_in_use(arena), counts.spanned)
        return found
    finally:
        if done:
            arena_copy_free(&copy)
        free(sums.by_tag)
        free(sums)


cdef void sum_up(const ArenaCore* arena, ArenaCopy* copy, Sums* sums) noexcept nogil:
    cdef uint32_t small, i
    # Sorted once, so that each free chunk finds its pages by bisection.
    if copy.page_count > 1:
        qsort(copy.pages, copy.page_count, sizeof(PageCopy), by_address)
    for small in range(2):
        for i in range(copy.tables[small].count):
            add_chunk(arena, copy, small, i, sums)
    hooks_bytes(arena, sums.through_hooks)


cdef void add_chunk(const ArenaCore* arena, const ArenaCopy* copy, bint small, uint32_t index,
                    Sums* sums) noexcept nogil:
    cdef const Chunk* chunk = &copy.tables[small].chunks[index]
    if chunk.state == CHUNK_USED:
        sums.in_use += chunk.size
        add_owner(arena, small, index, chunk, sums)
    elif chunk.state == CHUNK_CACHED:
        sums.cached += chunk.size
    elif chunk.state == CHUNK_PENDING_FREE:
        sums.pending_free += chunk.size
    elif chunk.state == CHUNK_FREE:
        sums.free += chunk.size
        # A persistent block serves no other request: its region waits for work to be done.
        if chunk.persistent:
            sums.waiting += chunk.size
            return
        # Free for its own stream, but for this one only after an event.
        if chunk.stream_slot != SLOT_RELEASED and chunk.stream_slot != sums.stream_slot:
            sums.waiting += chunk.size
        sums.largest_free = max(sums.largest_free, chunk.size)
        sums.movable += pages_inside(copy, chunk.address, chunk.address + chunk.size)


cdef void add_owner(const ArenaCore* arena, bint small, uint32_t index, const Chunk* chunk,
                    Sums* sums) noexcept nogil:
    cdef BlockNote note
    cdef uint32_t tag, framework
    # The generation tells whether the note is of this block, or of an earlier one there.
    if not block_note(arena, small, index, chunk.generation, &note):
        return
    # The note's word: tag in the upper half, framework in bits 8 to 15.
    tag = <uint32_t>(note.seal >> 32) & (TAGS - 1)
    framework = <uint8_t>(note.seal >> 8)
    sums.noted[framework] += chunk.size
    if tag:
        sums.by_tag[tag] += chunk.size
    else:
        sums.untagged[framework] += chunk.size


cdef int by_address(const void* one, const void* other) noexcept nogil:
    cdef uint64_t a = (<const PageCopy*>one).address
    cdef uint64_t b = (<const PageCopy*>other).address
    # A difference of 64-bit addresses does not fit an int.
    return (a > b) - (a < b)


cdef uint64_t pages_inside(const ArenaCopy* copy, uint64_t begin, uint64_t end) noexcept nogil:
    # Bytes of the pages that lie wholly in a free chunk.
    cdef uint32_t low = 0
    cdef uint32_t high = copy.page_count
    cdef uint32_t middle
    cdef uint64_t found = 0
    while low < high:
        middle = (low + high) // 2
        if copy.pages[middle].address < begin:
            low = middle + 1
        else:
            high = middle
    while low < copy.page_count and copy.pages[low].address + copy.pages[low].nbytes <= end:
        found += copy.pages[low].nbytes
        low += 1
    return found


cdef dict described(const Sums* sums, uint64_t span_used):
    cdef uint32_t number
    from gpumem._arena import reports
    by_tag = {label_texts[number]: sums.by_tag[number] for number in range(1, len(label_texts))
              if sums.by_tag[number]}
    by_framework = [(FRAMEWORKS[number], sums.through_hooks[number], sums.noted[number],
                     sums.untagged[number]) for number in range(1, len(FRAMEWORKS))]
    by_owner, by_framework = reports.owners_of(sums.in_use, by_tag, by_framework, span_used)
    return {
        "in_use": sums.in_use + span_used, "free": sums.free, "cached": sums.cached,
        "pending_free": sums.pending_free, "waiting": sums.waiting, "movable": sums.movable,
        "largest_free": sums.largest_free, "by_owner": by_owner, "by_framework": by_framework,
    }

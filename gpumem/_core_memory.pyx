"""Sums of an arena's memory by state and owner; see _core_memory.pxd."""

from dataclasses import replace

from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, qsort

from gpumem._arena_copy cimport ArenaCopy, PageCopy, arena_copy, arena_copy_free
from gpumem._arena_recorded cimport block_note
from gpumem._arena_types cimport (
    arena_in_use,
    ArenaCore,
    arena_reserved,
    BlockNote,
)
from gpumem._bfc cimport (
    CHUNK_FREE,
    CHUNK_CACHED,
    CHUNK_PENDING_FREE,
    CHUNK_USED,
    Chunk,
    SLOT_RELEASED,
)
from gpumem._buffer cimport MemoryResource
from gpumem._core_settings cimport pages_problem
from gpumem._device_memory cimport device_figures
from gpumem._outlets cimport outlets_bytes

from gpumem._recorder import FRAMEWORKS, tag_texts
from gpumem.out_of_memory import LimitInForce, OutOfMemoryReport, find_remedies

cdef enum:
    TAGS = 65536
    MOST_FRAMEWORKS = 256

cdef struct Sums:
    uint32_t stream_slot                        # of the stream that asks
    uint64_t in_use
    uint64_t free
    uint64_t cached
    uint64_t parked
    uint64_t waiting
    uint64_t movable
    uint64_t largest_free
    uint64_t* by_tag                            # TAGS
    uint64_t untagged[MOST_FRAMEWORKS]          # noted without a tag, by framework
    uint64_t noted[MOST_FRAMEWORKS]             # noted, by framework
    uint64_t through_outlets[MOST_FRAMEWORKS]   # bytes asked for, of callers that are known anyway


cdef object report_of(MemoryResource resource, ArenaCore* arena, uint64_t asked, uint64_t rounded,
                      uint32_t slot, str reason):
    memory = str(resource.memory)
    held = memory_of(arena, slot)
    if held is None:            # the host has no memory for the books' copy: what is known without
        held = {"in_use": arena_in_use(arena), "reserved": arena_reserved(arena)}
    limit = limit_of(arena)
    report = OutOfMemoryReport(
        memory, asked, rounded, resource.name, <uintptr_t>arena.streams[slot].handle,
        (LimitInForce("max_mem", limit, arena_held(arena)),) if limit else (),
        **held, **device_figures(resource, arena.place, arena))
    still = (not arena.settings.paged and arena.backing.source == NULL
             and not pages_problem(resource.memory))
    return replace(report, remedies=find_remedies(report, reason, could_move=still))


cdef inline uint64_t limit_of(const ArenaCore* arena) noexcept:
    # A graph pool keeps to its arena's.
    return arena.parent.settings.max_mem if arena.parent != NULL else arena.settings.max_mem


cdef inline uint64_t arena_held(const ArenaCore* arena) noexcept:
    cdef const ArenaCore* root = arena.parent if arena.parent != NULL else arena
    return arena_reserved(root) + root.lent


cdef dict memory_of(ArenaCore* arena, uint32_t slot):
    # Sums in bytes as the stream of `slot` sees them. None: no host memory for the books' copy.
    cdef ArenaCopy copy
    cdef Sums* sums = <Sums*>calloc(1, sizeof(Sums))
    cdef bint done = False
    if sums == NULL:
        return None
    sums.stream_slot = slot
    sums.by_tag = <uint64_t*>calloc(TAGS, sizeof(uint64_t))
    try:
        if sums.by_tag != NULL:
            with nogil:
                done = arena_copy(arena, &copy)
                if done:
                    sum_up(arena, &copy, sums)
        if not done:
            return None
        found = described(sums)
        found["reserved"] = copy.reserved
        return found
    finally:
        if done:
            arena_copy_free(&copy)
        free(sums.by_tag)
        free(sums)


cdef void sum_up(const ArenaCore* arena, ArenaCopy* copy, Sums* sums) noexcept nogil:
    cdef uint32_t small, i
    if copy.page_count > 1:
        qsort(copy.pages, copy.page_count, sizeof(PageCopy), by_address)
    for small in range(2):
        for i in range(copy.tables[small].count):
            add_chunk(arena, copy, small, i, sums)
    outlets_bytes(arena, sums.through_outlets)


cdef void add_chunk(const ArenaCore* arena, const ArenaCopy* copy, bint small, uint32_t index,
                    Sums* sums) noexcept nogil:
    cdef const Chunk* chunk = &copy.tables[small].chunks[index]
    if chunk.state == CHUNK_USED:
        sums.in_use += chunk.size
        add_owner(arena, small, index, chunk, sums)
    elif chunk.state == CHUNK_CACHED:
        sums.cached += chunk.size
    elif chunk.state == CHUNK_PENDING_FREE:
        sums.parked += chunk.size
    elif chunk.state == CHUNK_FREE:
        sums.free += chunk.size
        if chunk.stream_slot != SLOT_RELEASED and chunk.stream_slot != sums.stream_slot:
            sums.waiting += chunk.size
        sums.largest_free = max(sums.largest_free, chunk.size)
        sums.movable += pages_inside(copy, chunk.address, chunk.address + chunk.size)


cdef void add_owner(const ArenaCore* arena, bint small, uint32_t index, const Chunk* chunk,
                    Sums* sums) noexcept nogil:
    cdef BlockNote note
    cdef uint32_t tag, framework
    if not block_note(arena, small, index, chunk.generation, &note):
        return
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


cdef dict described(const Sums* sums):
    # What an outlet's callers hold is known without a recording; what was noted of them is in it.
    by_owner = {tag_texts[tag]: sums.by_tag[tag] for tag in range(1, len(tag_texts))
                if sums.by_tag[tag]}
    by_framework = {}
    for number, name in enumerate(FRAMEWORKS[1:], start=1):
        held = max(sums.through_outlets[number], sums.noted[number])
        if held:
            by_framework[name] = held
            tagged = sums.noted[number] - sums.untagged[number]
            if held > tagged:
                by_owner[name] = by_owner.get(name, 0) + held - tagged
    rest = sums.in_use - min(sums.in_use, sum(by_owner.values()))
    if rest:
        by_owner["untagged"] = rest
    return {
        "in_use": sums.in_use, "free": sums.free, "cached": sums.cached, "parked": sums.parked,
        "waiting": sums.waiting, "movable": sums.movable, "largest_free": sums.largest_free,
        "by_owner": dict(sorted(by_owner.items(), key=lambda item: -item[1])),
        "by_framework": dict(sorted(by_framework.items(), key=lambda item: -item[1])),
    }

"""Reports and exceptions of an arena; see _core_reports.pxd."""

from dataclasses import replace

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free

from gpumem._arena cimport arena_copy_chunks
from gpumem._arena_heap_books cimport heap_copy
from gpumem._arena_heap_types cimport DebugHeap, HEAP_LIVE, HeapBlock
from gpumem._arena_types cimport (
    ARENA_CLOSED,
    ARENA_DEAD,
    ARENA_DRIVER_REFUSED,
    ARENA_HALF_SUSPENDED,
    ARENA_NO_COPY,
    ARENA_NO_METADATA,
    ARENA_OVER_BUDGET,
    ARENA_OVER_LIMIT,
    ArenaCore,
    STATE_SUSPENDED,
)
from gpumem._bfc cimport (
    ABSURD,
    CHUNK_PENDING_FREE,
    CHUNK_USED,
    Chunk,
    SLOT_RELEASED,
    round_to_quantum,
)
from gpumem._buffer cimport MemoryResource
from gpumem._core_budget cimport raise_over_budget
from gpumem._core_memory cimport report_of
from gpumem._core_source cimport source_error
from gpumem._driver cimport CUDA_ERROR_OUT_OF_MEMORY, CUresult, check

from gpumem.errors import ClosedError, OutOfMemoryError, SourceError, SuspendedError
from gpumem.stats import BlockInfo
from gpumem.stats import RetainedRegion


# ---- blocks --------------------------------------------------------------------------------------

cdef list block_list(ArenaCore* core):
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef Chunk* chunks = arena_copy_chunks(core, &count)
    if chunks == NULL:
        raise MemoryError("no host memory for a copy of the arena's books")
    try:
        blocks = sorted((block_info(core, &chunks[i]) for i in range(count)),
                        key=lambda block: block.address)
    finally:
        free(chunks)
    return blocks if core.heap == NULL else as_users_have_them(core.heap, blocks)


cdef object block_info(ArenaCore* core, const Chunk* chunk):
    cdef bint used = chunk.state == CHUNK_USED
    cdef bint parked = chunk.state == CHUNK_PENDING_FREE
    stream = 0
    if used or chunk.stream_slot != SLOT_RELEASED:
        stream = <uintptr_t>core.streams[chunk.stream_slot].handle
    return BlockInfo(address=chunk.address, nbytes=chunk.size, requested=chunk.requested,
                     used=used, region=chunk.region, stream=stream, parked=parked)


cdef list as_users_have_them(DebugHeap* heap, list blocks):
    # What a debug heap keeps back is in use for the arena alone.
    cdef uint64_t count = 0
    cdef uint64_t i
    cdef HeapBlock* known = heap_copy(heap, True, &count)
    if known == NULL:
        raise MemoryError("no host memory for a copy of a debug heap's books")
    try:
        at = {known[i].base: (known[i].asked, known[i].state == HEAP_LIVE) for i in range(count)}
    finally:
        free(known)
    return [as_its_user_has_it(block, at.get(block.address)) if block.used else block
            for block in blocks]


cdef object as_its_user_has_it(object block, tuple known):
    if known is None:           # it went back to the arena meanwhile, or came from it
        return block
    asked, live = known
    return replace(block, requested=asked if live else 0, used=live, parked=not live)


cdef tuple kept_regions(ArenaCore* core):
    regions = {}
    for block in block_list(core):
        regions.setdefault(block.region, []).append(block)
    return tuple(kept_region(blocks) for blocks in regions.values())


cdef object kept_region(list blocks):
    live = tuple(block for block in blocks if block.used)
    parked = tuple(block for block in blocks if block.parked)
    reasons = [counted(live, "live block")] if live else []
    if parked:
        reasons.append(f"{counted(parked, 'block')} that other streams still use")
    reasons += queued(blocks)
    return RetainedRegion(
        address=blocks[0].address,
        nbytes=sum(block.nbytes for block in blocks),
        reason=", ".join(reasons) or "free, but the driver did not take it back",
        blocks=live + parked)


cdef list queued(list blocks):
    """Say what was freed on which stream and is not known to be done."""
    freed = {}
    for block in blocks:
        if not block.used and not block.parked and block.stream:
            freed[block.stream] = freed.get(block.stream, 0) + block.nbytes
    return [f"{nbytes} bytes freed on stream {stream:#x}, whose work is not known to be done"
            for stream, nbytes in sorted(freed.items())]


cdef str counted(tuple blocks, str what):
    total = sum(block.nbytes for block in blocks)
    return f"{len(blocks)} {what}{'s' if len(blocks) != 1 else ''} of {total} bytes"


# ---- the one place that raises -------------------------------------------------------------------

cdef int raise_status(MemoryResource arena, ArenaCore* core, uint64_t asked, uint64_t extra,
                      uint32_t slot, int status) except -1:
    if status == ARENA_DEAD:
        raise ClosedError(f"arena {arena.name!r} belongs to the parent process, or the "
                          "interpreter is ending")
    if status == ARENA_CLOSED and core.closed == STATE_SUSPENDED:
        raise SuspendedError(f"arena {arena.name!r} is suspended: resume() brings its memory back")
    if status == ARENA_CLOSED:
        raise ClosedError(f"arena {arena.name!r} is closed")
    if status == ARENA_HALF_SUSPENDED:
        raise_half_suspended(arena, core)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, core, asked, extra, slot, [])
    if status == ARENA_NO_METADATA:
        raise MemoryError("no host memory for an arena's books")
    failure = source_error(core)
    if status == ARENA_DRIVER_REFUSED and core.last_code != <int>CUDA_ERROR_OUT_OF_MEMORY:
        raise_source_error(arena, failure)
        call = core.last_call if core.last_call != NULL else core.backing.call
        check(arena.place.place.table, <CUresult>core.last_code, (<bytes>call).decode())
    raise_out_of_memory(arena, core, asked, extra, slot, status, failure)


cdef int raise_half_suspended(MemoryResource arena, ArenaCore* core) except -1:
    """Raise what suspend met: refused half-way, and refused when that was to be undone."""
    try:
        check(arena.place.place.table, <CUresult>core.last_code,
              (<bytes>core.last_call).decode())
    except Exception as refusal:
        raise SuspendedError(
            f"arena {arena.name!r} is suspended, but not all of its memory went back: the driver "
            f"refused to unmap a page, and then to bring the others back ({refusal}). The bytes of "
            "live blocks are in their copy on the host; resume() can be tried") from refusal


cdef int raise_source_error(MemoryResource arena, object failure) except -1:
    """Raise what a source's call failed with; None: it was the driver's."""
    if failure is None:
        return 0
    if isinstance(failure, SourceError) or not isinstance(failure, Exception):
        raise failure           # ours, or an interrupt on its way out
    raise SourceError(f"the source of arena {arena.name!r} raised "
                      f"{type(failure).__name__}: {failure}") from failure


cdef int raise_out_of_memory(MemoryResource arena, ArenaCore* core, uint64_t asked,
                             uint64_t extra, uint32_t slot, int status, object cause) except -1:
    cdef uint64_t rounded = round_to_quantum(asked + extra)
    if core.heap != NULL:
        rounded += 2 * core.heap.settings.guard
    reason = "driver"
    if status == ARENA_NO_COPY:
        reason = "copy"
    elif rounded >= ABSURD:
        reason = "absurd"
    elif status == ARENA_OVER_LIMIT:
        reason = "limit" if core.settings.max_mem or core.parent != NULL else "addresses"
    raise OutOfMemoryError.of(
        report_of(arena, core, asked, rounded, slot, reason)) from cause

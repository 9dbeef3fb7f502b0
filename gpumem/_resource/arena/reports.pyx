"""Reports and exceptions of an arena."""

from dataclasses import fields, replace
from threading import get_ident

from libc.stdint cimport uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free, qsort

from gpumem._budget cimport (
    account_of, Budget, budget_relieve, press, raise_exceeded, Relief, tell_errors,
)
from gpumem._buffer cimport MemoryResource
from gpumem._native.arena cimport (
    AllocatorHook, arena_check, ARENA_CLOSED, arena_copy, arena_copy_blocks, arena_copy_free,
    ARENA_DEAD, ARENA_DRIVER_REFUSED, arena_extensions, ARENA_HALF_ASLEEP, arena_in_use,
    arena_is_open, arena_max_in_use, ARENA_NO_COPY, ARENA_NO_METADATA, ARENA_NO_STREAM_SLOT,
    ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, arena_reserved, arena_reserved_now, arena_shrinkages,
    arena_state, ArenaCopy, ArenaCore, ArenaStats, backing_calls, block_note, BlockCopy, BlockNote,
    caches_flush, DebugHeap, family_held, heap_check, heap_copy, heap_counts, HEAP_LIVE, HeapBlock,
    HeapCounts, hook_allocate, hooks_bytes, invariant_text, LARGE_SPACE, last_refusal,
    last_refused_call, MAX_STREAMS, PageCopy, root_of, SMALL_SPACE, STATE_ASLEEP, StreamSlot,
    tag_next,
)
from gpumem._native.bfc cimport (
    ABSURD, bfc_largest_free, Chunk, CHUNK_CACHED, CHUNK_FREE, CHUNK_PENDING_FREE, CHUNK_USED,
    round_to_quantum, SLOT_RELEASED,
)
from gpumem._native.budget cimport budget_ceiling, budget_charged, BUDGET_UNLIMITED, BudgetCore
from gpumem._native.driver cimport (
    check, context_is_dead, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUstream, error_name,
)
from gpumem._native.pages cimport GRANULE, Space
from gpumem._resource.arena.settings cimport ArenaBase, pages_problem
from gpumem._resource.arena.source cimport source_error
from gpumem._resource.device_memory cimport device_figures
from gpumem._support.atomics cimport count_now, load32, load64
from gpumem._support.deferred cimport report_unraisable
from gpumem._support.lock cimport lock_acquire, lock_release

from gpumem._support.events import FRAMEWORKS, tag_texts
from gpumem._support.providers import provided
from gpumem._support.sizes import format_size
from gpumem._support.texts import counted
from gpumem.errors import (
    ClosedError, ConfigError, GpumemError, InUseError, OutOfMemoryError, SourceError,
    SuspendedError,
)


cdef class ReportingArena(ArenaBase):
    """The counters, blocks and checks of an arena."""

    def stats(self):
        """Return the counters of this moment as `Stats`.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> stats = arena.stats()
        >>> stats.requested_in_use, stats.in_use, stats.reserved >= stats.in_use
        (1000, 1024, True)
        """
        self.require_own()
        return arena_stats(self.core)

    def blocks(self):
        """Return every block, used and free, as a list of `BlockInfo` in address order.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> [(block.nbytes, block.allocated_nbytes) for block in arena.blocks() if block.used]
        [(1000, 1024)]
        """
        self.require_own()
        return block_list(self.core)

    def report(self, path, *, title=None):
        """Write a page of HTML that shows what is in use now; see `gpumem.observe.write_report`.

        Blocks have ages, tags and stacks if they were allocated while something recorded.

        Parameters
        ----------
        path : str or path
            The page.
        title : str, optional
            Its heading; the arena's name if left out.

        Returns
        -------
        gpumem.observe.Report

        Raises
        ------
        TraceError
            Nothing is in use.
        OSError
            The page cannot be written.

        Examples
        --------
        >>> import os, tempfile, gpumem
        >>> arena = gpumem.Arena("host")
        >>> weights = arena.allocate(1000)
        >>> arena.report(os.path.join(tempfile.mkdtemp(), "arena.html")).peak_live_bytes
        1000
        """
        return provided("report")(self, path, title)

    def check_invariants(self):
        """Check every invariant of the arena's metadata.

        Raises
        ------
        GpumemError
            Naming the first invariant that does not hold. A defect of gpumem, or memory that
            something else overwrote.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffers = [arena.allocate(nbytes) for nbytes in (100, 5000, 1 << 20)]
        >>> del buffers[1]
        >>> arena.check_invariants()         # returns: all invariants hold
        """
        cdef int broken
        self.require_own()
        with nogil:
            broken = arena_check(self.core)
        if broken:
            raise GpumemError(f"arena {self.name!r} is corrupt: invariant {broken} is violated: "
                              f"{invariant_text(broken).decode()}")

    def check_heap(self, *, wait=True):
        """Look for invalid writes, in every block of the debug heap."""
        require_heap(self)
        self.require_own()
        self.require_open()
        self.require_outside_source()
        return self.heap.check(self.core, wait)

    def outstanding(self):
        """Return the live blocks of an arena with a debug heap, the oldest first."""
        require_heap(self)
        self.require_own()
        return self.heap.outstanding()

    @property
    def debug_heap(self):
        """The `DebugHeapOptions` of its debug heap; None without one."""
        return None if self.heap is None else self.heap.options

    def _look(self):
        # At the process's end: without a wait; the caller delivers the findings.
        if arena_is_open(self.core) and not context_is_dead(&self.driver_device.context):
            with nogil:
                heap_check(self.core)


cdef int require_heap(ArenaBase arena) except -1:
    if arena.heap is None:
        raise ConfigError(f"arena {arena.name!r} has no debug heap: create it with "
                          "debug_heap=True, or set GPUMEM_DEBUG_HEAP=1 in the environment")
    return 0


# ---- counters ------------------------------------------------------------------------------------

cdef object arena_stats(ArenaCore* core):
    cdef ArenaStats stats
    cdef HeapCounts heap
    cdef uint64_t spans, in_use, reserved, most, largest, regions, extensions, shrinkages
    # Cached blocks would count as in use; afterwards the figures under the lock are consistent.
    caches_flush(core)
    lock_acquire(&core.lock)
    stats = core.stats
    spans = core.span_used
    in_use = arena_in_use(core) + spans
    reserved = arena_reserved_now(core)
    most = arena_max_in_use(core)
    regions = regions_held(core)
    extensions, shrinkages = arena_extensions(core), arena_shrinkages(core)
    largest = max(bfc_largest_free(&core.table), bfc_largest_free(&core.small))
    heap = HeapCounts(0, core.table.requested_in_use + core.small.requested_in_use, 0, 0)
    lock_release(&core.lock)
    # Blocks in quarantine are free for users, though the table counts them as used.
    if core.heap != NULL:
        heap = heap_counts(core.heap)
    from gpumem.stats import Stats
    return Stats(
        limit=load64(&core.settings.max_mem),
        in_use=in_use - min(heap.held_bytes, in_use),
        requested_in_use=heap.live_bytes + spans,
        virtual=load64(&core.spanned),
        reserved=reserved,
        max_in_use=most,
        max_reserved=stats.max_reserved,
        num_allocs=stats.num_allocs,
        num_frees=stats.num_frees + heap.held,
        num_reserves=stats.num_reserves,
        num_extensions=extensions,
        num_regions=regions,
        num_shrinkages=shrinkages,
        max_alloc_size=stats.max_alloc_size,
        largest_free=largest,
        pages_moved=(load64(&core.spaces[LARGE_SPACE].moved)
                     + load64(&core.spaces[SMALL_SPACE].moved)),
        suspended_bytes=load64(&core.sleeper.nbytes),
        moves_refused=(load64(&core.spaces[LARGE_SPACE].spared)
                       + load64(&core.spaces[SMALL_SPACE].spared)),
        driver_calls=(backing_calls(core) + stats.events_recorded + stats.events_asked
                      + stats.events_waited),
    )


cdef object sum_of_stats(list parts):
    """Add the counters of arenas that share a limit, that of the first one."""
    largest = ("max_alloc_size", "largest_free")
    sums = {each.name: sum([getattr(part, each.name) for part in parts])
            for each in fields(parts[0]) if each.name not in ("limit", *largest)}
    most = {name: max([getattr(part, name) for part in parts]) for name in largest}
    return type(parts[0])(limit=parts[0].limit, **sums, **most)


cdef uint64_t regions_held(const ArenaCore* arena) noexcept:
    # All pages for ordinary blocks count as one region.
    cdef uint64_t held = arena.table.regions_live + arena.small.regions_live
    cdef const Space* space
    cdef bint paged = False
    cdef uint32_t i
    # Reserved ranges for pages are regions in the tables, too: they are taken off here.
    for i in (LARGE_SPACE, SMALL_SPACE):
        space = &arena.spaces[i]
        held -= space.range_count
        paged = paged or space.physical != 0
    return held + paged


# ---- blocks --------------------------------------------------------------------------------------

cdef list block_list(ArenaCore* core):
    from gpumem.stats import BlockInfo
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef BlockCopy* copies = arena_copy_blocks(core, &count)
    if copies == NULL:
        raise MemoryError("out of host memory while copying arena metadata")
    try:
        blocks = sorted((block_info(BlockInfo, core, &copies[i]) for i in range(count)),
                        key=lambda block: block.address)
    finally:
        free(copies)
    return blocks if core.heap == NULL else as_users_have_them(core.heap, blocks)


cdef object block_info(object kind, ArenaCore* core, const BlockCopy* copy):
    cdef const Chunk* chunk = &copy.chunk
    cdef bint used = chunk.state == CHUNK_USED
    cdef bint pending_free = chunk.state == CHUNK_PENDING_FREE
    stream = 0
    # A released chunk belongs to any stream: 0.
    if used or chunk.stream_slot != SLOT_RELEASED:
        stream = <uintptr_t>core.streams[chunk.stream_slot].handle
    return kind(address=chunk.address, nbytes=chunk.requested if used else 0,
                allocated_nbytes=chunk.size, used=used, region=copy.region, stream=stream,
                pending_free=pending_free)


cdef list as_users_have_them(DebugHeap* heap, list blocks):
    # Blocks in a debug heap's quarantine are in use for the arena, and free for its users.
    cdef uint64_t count = 0
    cdef uint64_t i
    cdef HeapBlock* known = heap_copy(heap, True, &count)
    if known == NULL:
        raise MemoryError("out of host memory while copying a debug heap's metadata")
    try:
        at = {known[i].base: (known[i].requested, known[i].state == HEAP_LIVE)
              for i in range(count)}
    finally:
        free(known)
    return [as_its_user_has_it(block, at.get(block.address)) if block.used else block
            for block in blocks]


cdef object as_its_user_has_it(object block, tuple known):
    if known is None:           # freed meanwhile, or allocated before the heap recorded it
        return block
    asked, live = known
    return replace(block, nbytes=asked if live else 0, used=live, pending_free=not live)


cdef tuple retained_regions(ArenaCore* core):
    regions = {}
    for block in block_list(core):
        regions.setdefault(block.region, []).append(block)
    return tuple(retained_region(blocks) for blocks in regions.values())


cdef object retained_region(list blocks):
    # Both keep a region: live blocks by their users, pending ones by other streams.
    live = tuple(block for block in blocks if block.used)
    pending = tuple(block for block in blocks if block.pending_free)
    reasons = [counted_with_size(live, "live block")] if live else []
    if pending:
        reasons.append(f"{counted_with_size(pending, 'block')} that other streams still use")
    reasons += held_for_streams(blocks)
    from gpumem.stats import RetainedRegion
    return RetainedRegion(
        address=blocks[0].address,
        allocated_nbytes=sum(block.allocated_nbytes for block in blocks),
        reason=", ".join(reasons) or "free, but the driver did not take it back",
        blocks=live + pending)


cdef list held_for_streams(list blocks):
    """Describe the free bytes that only one stream may have until its work is known to be done."""
    # Freed there, or never in use: what is left of memory that was made for a block of the stream.
    held = {}
    for block in blocks:
        if not block.used and not block.pending_free and block.stream:
            held[block.stream] = held.get(block.stream, 0) + block.allocated_nbytes
    return [f"{format_size(nbytes)} free, for stream {stream:#x} whose work is not known to be done"
            for stream, nbytes in sorted(held.items())]


cdef str counted_with_size(tuple blocks, str what):
    total = sum(block.allocated_nbytes for block in blocks)
    return f"{counted(len(blocks), what)} of {format_size(total)}"


# ---- the one place that raises -------------------------------------------------------------------

cdef int raise_status(ArenaBase arena, uint64_t asked, uint64_t extra, uint32_t slot,
                      int status) except -1:
    # First the states of the arena, in which no figures may be read.
    if status == ARENA_DEAD:
        raise ClosedError(f"arena {arena.name!r} belongs to the parent process, or the "
                          "interpreter is ending")
    if status == ARENA_CLOSED and arena_state(arena.core) == STATE_ASLEEP:
        raise SuspendedError(f"arena {arena.name!r} is asleep: wake() brings its memory back")
    if status == ARENA_CLOSED:
        raise ClosedError(f"arena {arena.name!r} is closed")
    if status == ARENA_HALF_ASLEEP:
        raise_half_asleep(arena)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, asked, extra, slot, [])
    if status == ARENA_NO_METADATA:
        raise MemoryError("out of host memory while allocating arena metadata")
    if status == ARENA_NO_STREAM_SLOT:
        raise MemoryError(
            f"arena {arena.name!r} has blocks or work of {MAX_STREAMS - 1:,} streams, the most "
            "that it can tell apart: free the blocks of streams that are done, and call "
            "reset_stream() for those that were given as raw handles")
    # Taken off in any case, so that a later failure is not attributed to it.
    failure = source_error(arena.core)
    if status == ARENA_DRIVER_REFUSED and last_refusal(arena.core) != CUDA_ERROR_OUT_OF_MEMORY:
        raise_source_error(arena, failure)
        raise_refusal(arena.core)
    raise_out_of_memory(arena, asked, extra, slot, status, failure)


cdef int raise_in_use(ArenaBase arena) except -1:
    stats = arena.stats()
    graphs, spans = count_now(&arena.core.graphs), count_now(&arena.core.live_spans)
    blocks = stats.num_allocs - stats.num_frees
    found, advice = [], []
    if blocks or not (graphs or spans):
        found.append(f"{format_size(stats.in_use)} in {counted(blocks, 'block')}")
        advice.append("close the buffers and drop their views")
    if spans:
        # Their bytes count with those of blocks, where there are any.
        held = "" if found else f"{format_size(stats.in_use)} in "
        found.append(held + counted(spans, "virtual tensor"))
        advice.append("close the virtual tensors")
    if graphs:
        found.append(f"{counted(graphs, 'graph')} with memory of its pools")
        advice.append("drop the graphs")
    raise InUseError(f"arena {arena.name!r} cannot be closed; in use: {', '.join(found)}; "
                     f"{', '.join(advice)} first"
                     + (arena.heap.live_text() if arena.heap is not None else ""))


cdef int raise_half_asleep(ArenaBase arena) except -1:
    """Raise for a sleep that was refused half-way, and whose undoing was refused too."""
    try:
        raise_refusal(arena.core)
    except Exception as refusal:
        raise SuspendedError(
            f"arena {arena.name!r} is asleep in part: the driver refused a step of sleep(), and "
            f"then refused to undo the steps before it ({refusal}). The contents of live blocks "
            "are safe; call wake()") from refusal


cdef int raise_refusal(ArenaCore* core) except -1:
    # Without a call of the arena's own it was the backing that called.
    cdef const char* own = last_refused_call(core)
    cdef const char* call = own if own != NULL else core.backing.call
    return check(core.context.table, last_refusal(core), call.decode())


cdef int raise_source_error(MemoryResource arena, object failure) except -1:
    """Raise the failure of a source's call; None: the driver failed."""
    if failure is None:
        return 0
    # Neither is wrapped: a program must be able to end, and ours says enough.
    if isinstance(failure, SourceError) or not isinstance(failure, Exception):
        raise failure           # raised by gpumem, or an interrupt of the program
    raise SourceError(f"the source of arena {arena.name!r} raised "
                      f"{type(failure).__name__}: {failure}") from failure


cdef int raise_out_of_memory(ArenaBase arena, uint64_t asked, uint64_t extra, uint32_t slot,
                             int status, object cause) except -1:
    cdef uint64_t rounded = round_to_quantum(asked + extra)
    # The block has a guard before and one behind the user's bytes.
    if arena.core.heap != NULL:
        rounded += 2 * arena.core.heap.settings.guard
    # The remedies depend on which limit was reached.
    reason = "driver"
    if status == ARENA_NO_COPY:
        reason = "copy"
    elif rounded >= ABSURD:
        reason = "absurd"
    elif status == ARENA_OVER_LIMIT:
        has_limit = load64(&arena.core.settings.max_mem) or arena.core.parent != NULL
        reason = "limit" if has_limit else "addresses"
    raise OutOfMemoryError.of(report_of(arena, asked, rounded, slot, reason)) from cause


# ---- Sums of an arena's memory by state and owner ------------------------------------------------


cdef enum:
    TAGS = 65536
    MOST_FRAMEWORKS = 256

cdef struct Sums:
    uint32_t stream_slot                        # of the stream that allocates
    uint64_t in_use
    uint64_t free
    uint64_t cached
    uint64_t pending_free
    uint64_t waiting
    uint64_t movable
    uint64_t largest_free
    uint64_t* by_tag                            # TAGS
    uint64_t untagged[MOST_FRAMEWORKS]          # noted without a tag, by framework
    uint64_t noted[MOST_FRAMEWORKS]             # noted, by framework
    uint64_t through_hooks[MOST_FRAMEWORKS]     # bytes asked for, of callers that are known anyway


cdef object report_of(ArenaBase arena, uint64_t asked, uint64_t rounded, uint32_t slot, str reason):
    cdef ArenaCore* core = arena.core
    held = family_memory_of(core, slot)
    # The only limit an arena has of its own; budgets add theirs to the report.
    limit = limit_of(core)
    from gpumem._support.out_of_memory import find_remedies, LimitInForce, OutOfMemoryReport
    report = OutOfMemoryReport(
        str(arena.memory), asked, rounded, arena.name, <uintptr_t>core.streams[slot].handle,
        (LimitInForce("max_mem", limit, arena_held(core)),) if limit else (),
        refused_streams=refused_streams(core), **held,
        **device_figures(arena, core.context, core))
    # Would pages, which can move, have helped? Then the report suggests them.
    still = (not core.settings.paged and core.backing.source == NULL
             and not pages_problem(arena.memory))
    page = GRANULE if core.settings.paged else 0
    return replace(report, remedies=find_remedies(report, reason, could_move=still, page=page))


cdef tuple refused_streams(ArenaCore* arena):
    # Of all tags: handles that freed memory waits for, and why the driver recorded no event there.
    cdef const StreamSlot* stream
    cdef ArenaCore* each = tag_next(arena, NULL)
    cdef uint32_t stream_slot
    found = {}
    while each != NULL:
        for stream_slot in range(1, each.table.stream_slot_count):
            stream = &each.streams[stream_slot]
            if stream.refusal != CUDA_SUCCESS and (load32(&stream.dirty) or stream.pending_frees):
                found[<uintptr_t>stream.handle] = error_name(each.context.table, stream.refusal)
        each = tag_next(arena, each)
    return tuple(sorted(found.items()))


cdef inline uint64_t limit_of(const ArenaCore* arena) noexcept:
    return load64(&root_of(arena).settings.max_mem)


cdef inline uint64_t arena_held(const ArenaCore* arena) noexcept:
    return family_held(arena)


cdef dict family_memory_of(ArenaCore* arena, uint32_t slot):
    """Add up the arena's memory and that of its tags, and what of them is asleep."""
    total = {} if arena_state(arena) == STATE_ASLEEP else memory_of(arena, slot)
    if total is None:           # out of host memory: what is known without a copy
        return {"in_use": arena_in_use(arena) + load64(&arena.span_used),
                "reserved": arena_reserved(arena) + load64(&arena.spanned)}
    root = arena_name(root_of(arena))
    asleep = {}
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        tag = arena_name(each)[len(root):].removeprefix(", tag ") or "default"
        if arena_state(each) == STATE_ASLEEP:
            asleep[tag] = load64(&each.sleeper.nbytes)
        elif each != arena:
            # What is free on its streams serves no stream of this one.
            add_memory(total, memory_of(each, SLOT_RELEASED) or {}, tag)
        each = tag_next(arena, each)
    return {**total, "asleep": asleep, "graph_pools": held_by_pools(arena)}


cdef uint64_t held_by_pools(ArenaCore* arena) noexcept nogil:
    # Of all tags. With its lock none of them ends.
    cdef ArenaCore* root = <ArenaCore*>root_of(arena)
    cdef ArenaCore* pool
    cdef uint64_t held = 0
    lock_acquire(&root.lock)
    pool = root.pools
    while pool != NULL:
        if pool != arena:
            held += arena_reserved_now(pool)
        pool = pool.next_child
    lock_release(&root.lock)
    return held


cdef str arena_name(const ArenaCore* arena):
    return (<bytes>arena.events.name).decode("utf-8", "replace")


cdef int add_memory(dict total, dict part, str tag) except -1:
    for name, value in part.items():
        if name == "by_owner":
            value = {f"tag {tag}" if owner == "untagged" else owner: held
                     for owner, held in value.items()}
        if isinstance(value, dict):
            sums = {owner: total.get(name, {}).get(owner, 0) + value.get(owner, 0)
                    for owner in {**total.get(name, {}), **value}}
            total[name] = dict(sorted(sums.items(), key=lambda item: -item[1]))
        elif name == "largest_free":
            total[name] = max(total.get(name, 0), value)
        else:
            total[name] = total.get(name, 0) + value
    return 0


cdef dict memory_of(ArenaCore* arena, uint32_t slot):
    # Sums in bytes as the stream of `slot` sees them. None: out of host memory.
    cdef ArenaCopy copy
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
        found = described(sums, load64(&arena.span_used))
        found["reserved"] = copy.reserved
        found["free"] += load64(&arena.spanned) - min(load64(&arena.span_used),
                                                      load64(&arena.spanned))
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
    # A hook counts its callers' bytes also without a recording; noted bytes are among them.
    by_owner = {tag_texts[tag]: sums.by_tag[tag] for tag in range(1, len(tag_texts))
                if sums.by_tag[tag]}
    by_framework = {}
    for number, name in enumerate(FRAMEWORKS[1:], start=1):
        held = max(sums.through_hooks[number], sums.noted[number])
        if held:
            by_framework[name] = held
            tagged = sums.noted[number] - sums.untagged[number]
            if held > tagged:
                by_owner[name] = by_owner.get(name, 0) + held - tagged
    # Notes and sums are of different moments: the rest must not wrap below zero.
    rest = sums.in_use - min(sums.in_use, sum(by_owner.values()))
    if rest:
        by_owner["untagged"] = rest
    if span_used:
        by_owner["virtual tensors"] = span_used
    return {
        "in_use": sums.in_use + span_used, "free": sums.free, "cached": sums.cached,
        "pending_free": sums.pending_free, "waiting": sums.waiting, "movable": sums.movable,
        "largest_free": sums.largest_free,
        "by_owner": dict(sorted(by_owner.items(), key=lambda item: -item[1])),
        "by_framework": dict(sorted(by_framework.items(), key=lambda item: -item[1])),
    }


# ---- An arena's budget ---------------------------------------------------------------------------


cdef int join_budget(ArenaBase arena, object budget, object count) except -1:
    cdef bint in_use = False
    cdef BudgetCore* account = account_of(budget, count, arena.name, &in_use)
    arena.budget = budget
    arena.core.events.budget = budget_charged(account)
    # `detour` takes allocations off the fast path, which charges nothing.
    if in_use:
        arena.core.in_use_account = account
        arena.core.detour += 1
    else:
        arena.core.held_account = account
    return 0


cdef str count_of(const ArenaCore* core):
    return "reserved" if core.in_use_account == NULL else "in_use"


cdef uint64_t least_limit(object budget, object count) except? 0:
    # A budget of blocks in use does not limit what the arena holds.
    if isinstance(budget, Budget) and count == "reserved":
        return budget_ceiling((<Budget>budget).core)
    return BUDGET_UNLIMITED


cdef inline BudgetCore* account(const ArenaCore* core) noexcept nogil:
    return core.held_account if core.in_use_account == NULL else core.in_use_account


cdef bint relieve(ArenaCore* core, Relief* relief, list errors) except -1:
    return press(account(core), load64(&core.over_budget), relief, errors)


cdef int allocate_under_pressure(AllocatorHook* hook, uint64_t nbytes, CUstream stream,
                                 uint32_t flags, uint64_t* address) noexcept nogil:
    cdef Relief relief = Relief(0, 0, 0, 0, NULL, 0, False)
    cdef ArenaCore* core = hook.arena
    cdef int status = ARENA_OVER_BUDGET
    while status == ARENA_OVER_BUDGET and budget_relieve(account(core), load64(&core.over_budget),
                                                         &relief):
        status = hook_allocate(hook, nbytes, stream, flags, address)
    return status


cdef int under_pressure(ArenaBase arena,
                        int (*call)(ArenaCore*, uint64_t) noexcept nogil,
                        uint64_t nbytes) except -1:
    cdef Relief relief = Relief(0, 0, 0, 0, NULL, 0, False)
    cdef list errors = []
    cdef int status = ARENA_OVER_BUDGET
    # One Relief for all tries, which bounds the number of callbacks.
    while status == ARENA_OVER_BUDGET and relieve(arena.core, &relief, errors):
        with nogil:
            status = call(arena.core, nbytes)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, nbytes, 0, 1, errors)
    tell_errors(errors)
    return status


cdef int raise_over_budget(ArenaBase arena, uint64_t asked, uint64_t extra,
                           uint32_t slot, list errors) except -1:
    rounded = round_to_quantum(asked + extra)
    report = report_of(arena, asked, rounded, slot, "budget")
    raise_exceeded(account(arena.core), load64(&arena.core.over_budget), errors, {"report": report})


# ---- Virtual tensors that give pages back --------------------------------------------------------


cdef enum:
    MOST_CALLS = 16         # of callbacks, for one request

# (thread, tensor) whose callback runs: its own allocations do not call it again.
cdef set relieving = set()


cdef bint tensors_relieve(ArenaBase arena, int status, uint64_t nbytes, object but,
                          Asking* asking) except -1:
    cdef uint64_t used
    if status not in (ARENA_OVER_LIMIT, ARENA_OVER_BUDGET, ARENA_DRIVER_REFUSED):
        return False
    while asking.reliever < len(arena.relievers) and asking.calls < MOST_CALLS:
        tensor = arena.relievers[asking.reliever]()
        used = virtual_in_use(arena.core)
        if tensor is not None and tensor is not but:
            asking.calls += 1
            call_reliever(tensor, nbytes)
        # It is asked again as long as it gives something.
        if virtual_in_use(arena.core) < used:
            return True
        asking.reliever += 1
    return False


cdef uint64_t virtual_in_use(ArenaCore* arena) noexcept nogil:
    # With those of its tags.
    cdef uint64_t total = 0
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        total += load64(&each.span_used)
        each = tag_next(arena, each)
    return total


cdef int call_reliever(object tensor, uint64_t nbytes) except -1:
    key = (get_ident(), id(tensor))
    callback = tensor.on_pressure
    if callback is None or key in relieving:
        return 0
    relieving.add(key)
    try:
        callback(tensor, nbytes)
    except Exception as error:
        report_unraisable(error, callback)
    finally:
        relieving.discard(key)
    return 0

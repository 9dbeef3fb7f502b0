"""Figures of an arena; a refused request: what may make room for it, then its exception."""

from threading import get_ident

from libc.stdint cimport uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free, qsort

from gpumem._arena.arena cimport Arena, Region
from gpumem._arena.graph_pool cimport end_finished_captures
from gpumem._arena.open cimport pages_problem, source_error
from gpumem._budget cimport (
    budget_call_pressure, call_pressure_callback, PressureState, raise_exceeded, report_errors,
)
from gpumem._native.arena.api cimport (
    AllocatorHook, APART_SHAREABLE, APART_TRANSPORT, arena_account, ARENA_ASLEEP, arena_backing,
    ARENA_CAPTURING, ARENA_CLOSED, arena_context, arena_copy, arena_copy_free, arena_counts,
    arena_counts_now, ARENA_DEAD, ARENA_DRIVER_REFUSED, arena_events, arena_find_apart,
    ARENA_HALF_ASLEEP, arena_heap, arena_held_by_pools, arena_is_paged, ARENA_NO_COPY,
    ARENA_NO_METADATA, ARENA_NO_STREAM_SLOT, ARENA_OK, ARENA_OVER_BUDGET, arena_over_budget,
    ARENA_OVER_LIMIT, arena_parent, arena_refusal, arena_refused_call, arena_state,
    arena_stream_count, arena_stream_handle, arena_stream_refusal, ArenaCopy, ArenaCore,
    ArenaCounts, Block, block_note, BlockNote, caches_flush, family_counts, FamilyCounts, heap_copy,
    HEAP_LIVE, heap_settings, HeapBlock, hook_allocate, hook_core, hooks_bytes, MAX_STREAMS,
    memory_is_out, PageCopy, slot_drop, slot_retain, STATE_ASLEEP, STATE_CLOSED, TableCopy,
    tag_next,
)
from gpumem._native.backing cimport Mapped
from gpumem._native.bfc cimport (
    ABSURD, Chunk, CHUNK_CACHED, CHUNK_FREE, CHUNK_HOLE, CHUNK_PENDING_FREE, CHUNK_USED, NIL,
    round_to_quantum, SLOT_RELEASED,
)
from gpumem._native.driver cimport (
    check, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUresult, CUstream, error_name,
)
from gpumem._native.pages cimport FILE_FAILED, GRANULE
from gpumem._resource cimport device_figures
from gpumem._support.clock cimport clock_ns
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport report_unraisable

from gpumem._arena import reports
from gpumem._buffer.holders import collect_and_name_cycles
from gpumem._support.events import FRAMEWORKS, label_texts
from gpumem._support.out_of_memory import kept_mappings
from gpumem._support.releases import release_retired
from gpumem.errors import ClosedError, ConfigError, OutOfMemoryError, SourceError, AsleepError


cdef enum:
    MAX_CALLS = 16          # of callbacks, for one request
    COLLECTION_PAUSE = 9    # times the duration of a collection that freed nothing

# (thread, tensor) of callbacks that are running: their own allocations do not call them again.
cdef set running_callbacks = set()


cdef class Pressure:
    def __cinit__(self):
        self.errors = []


# ---- Callbacks that may make room ----------------------------------------------------------------


cdef int take_under_pressure(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                             Region region, int status, Block* block) except -1:
    # First the pools of finished captures end, then callbacks are called. These may also close the
    # arena or reset the stream, so the slot is retained to keep its stream.
    cdef Pressure pressure = Pressure()
    slot_retain(arena.core, slot)
    try:
        if end_finished_captures(arena):
            status = arena.take_slow(asked + extra, slot, region, block)
        while make_room(arena, status, asked, None, pressure):
            status = arena.take_slow(asked + extra, slot, region, block)
    finally:
        slot_drop(arena.core, slot)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, asked, extra, slot, pressure)
    report_errors(pressure.errors)
    if status != ARENA_OK and status != ARENA_CAPTURING:
        raise_status(arena, asked, extra, slot, status, pressure)
    return status


cdef int under_pressure(Arena arena,
                        int (*call)(ArenaCore*, uint64_t) noexcept nogil,
                        uint64_t nbytes) except -1:
    cdef Pressure pressure = Pressure()
    cdef int status = ARENA_OVER_BUDGET
    # One state for all tries, which bounds the number of callbacks.
    while status == ARENA_OVER_BUDGET and call_pressure_callback(
            arena_account(arena.core), arena_over_budget(arena.core), &pressure.budget,
            pressure.errors):
        with nogil:
            status = call(arena.core, nbytes)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, nbytes, 0, 1, pressure)
    report_errors(pressure.errors)
    return status


cdef int allocate_under_pressure(AllocatorHook* hook, uint64_t nbytes, CUstream stream,
                                 uint32_t flags, uint64_t* address) noexcept nogil:
    cdef PressureState pressure = PressureState(0, 0, 0, 0, NULL, 0, False, False)
    cdef ArenaCore* core = hook_core(hook)
    cdef int status = ARENA_OVER_BUDGET
    while status == ARENA_OVER_BUDGET and budget_call_pressure(
            arena_account(core), arena_over_budget(core), &pressure):
        status = hook_allocate(hook, nbytes, stream, flags, address)
    return status


cdef bint make_room(Arena arena, int status, uint64_t nbytes, object but,
                    Pressure pressure) except -1:
    cdef uint64_t used
    if status not in (ARENA_OVER_LIMIT, ARENA_OVER_BUDGET, ARENA_DRIVER_REFUSED):
        return False
    while pressure.next < len(arena.pressure_tensors) and pressure.calls < MAX_CALLS:
        tensor = arena.pressure_tensors[pressure.next]()
        used = bytes_in_use(arena.core, True)
        if tensor is not None and tensor is not but:
            pressure.calls += 1
            call_on_pressure(tensor, nbytes)
        # Its callback is called again as long as it releases rows.
        if bytes_in_use(arena.core, True) < used:
            return True
        pressure.next += 1
    return (ask_budget(arena, status, pressure)
            or collect_once(arena, status, nbytes, pressure))


cdef bint ask_budget(Arena arena, int status, Pressure pressure) except -1:
    return status == ARENA_OVER_BUDGET and call_pressure_callback(
        arena_account(arena.core), arena_over_budget(arena.core), &pressure.budget,
        pressure.errors)


cdef bint collect_once(Arena arena, int status, uint64_t nbytes, Pressure pressure) except -1:
    if (pressure.has_collected or arena.config.oom_collect_ms == 0
            or not memory_is_out(arena.core, nbytes, status)):
        return False
    pressure.has_collected = True
    try:
        pressure.collected = collect_garbage(arena)
    except MemoryError:
        pass                    # without host memory the first refusal stands
    if pressure.collected is None:
        return False
    # Blocks of other arenas may have been charged to the budget, and are idle memory now.
    pressure.budget.idle_released = False
    return pressure.collected[0] != 0 or ask_budget(arena, status, pressure)


cdef uint64_t bytes_in_use(ArenaCore* arena, bint of_rows) noexcept nogil:
    """Add up the bytes in use in an arena and its tags; or those of virtual tensors' rows alone."""
    cdef uint64_t total = 0
    cdef ArenaCounts counts
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        arena_counts_now(each, &counts)
        total += counts.rows_in_use if of_rows else counts.in_use
        each = tag_next(arena, each)
    return total


cdef int call_on_pressure(object tensor, uint64_t nbytes) except -1:
    key = (get_ident(), id(tensor))
    callback = tensor.on_pressure
    if callback is None or key in running_callbacks:
        return 0
    running_callbacks.add(key)
    try:
        callback(tensor, nbytes)
    except Exception as error:
        report_unraisable(error, callback)
    finally:
        running_callbacks.discard(key)
    return 0


# ---- Garbage -------------------------------------------------------------------------------------


cdef tuple collect_garbage(Arena arena):
    cdef uint64_t began = clock_ns()
    cdef uint64_t before = bytes_in_use(arena.core, False)
    cdef uint64_t freed
    if began < arena.collects_from:
        return None
    cycles = collect_and_name_cycles()
    release_retired(False)      # arenas that were dropped
    freed = before - min(before, bytes_in_use(arena.core, False))
    arena.collects_from = 0 if freed else clock_ns() + COLLECTION_PAUSE * (clock_ns() - began)
    return freed, cycles if freed else ()


# ---- The exception -------------------------------------------------------------------------------


cdef int raise_status(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                      int status, Pressure pressure=None) except -1:
    # First the states of the arena, in which no figures may be read.
    if status == ARENA_DEAD:
        raise ClosedError(f"arena {arena.name!r} belongs to the parent process, or the "
                          "interpreter is ending")
    if status == ARENA_ASLEEP:
        raise_asleep(arena)
    if status == ARENA_CLOSED and arena_state(arena.core) != STATE_CLOSED:
        raise ClosedError(f"arena {arena.name!r} was being closed by another thread")
    if status == ARENA_CLOSED:
        raise ClosedError(f"arena {arena.name!r} is closed")
    if status == ARENA_HALF_ASLEEP:
        raise_half_asleep(arena)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, asked, extra, slot, pressure)
    if status == ARENA_NO_STREAM_SLOT:
        raise MemoryError(
            f"arena {arena.name!r} has blocks or work of {MAX_STREAMS - 1:,} streams, the most "
            "that it can tell apart: free the blocks of streams that are done, and call "
            "reset_stream() for those that were given as raw handles")
    # The exception is taken in any case, so that a later failure is not attributed to it.
    failure = source_error(arena.core)
    if status == ARENA_DRIVER_REFUSED and arena_refusal(arena.core) != CUDA_ERROR_OUT_OF_MEMORY:
        raise_source_error(arena, failure)
        raise_refusal(arena)
    raise_out_of_memory(arena, asked, extra, slot, status, failure, pressure)


cdef int raise_asleep(Arena arena) except -1:
    raise AsleepError(f"arena {arena.name!r} is asleep, or another thread is putting it to sleep: "
                      "wake() restores its memory")


cdef int raise_in_use(Arena arena) except -1:
    live = arena.heap.live_text() if arena.heap is not None else ""
    counts = counters_of(arena)
    raise reports.in_use_error(arena.name, arena.stats(), counts["graphs"], counts["live_spans"],
                               live)


cdef int require_heap(Arena arena) except -1:
    if arena.heap is None:
        raise ConfigError(f"arena {arena.name!r} has no debug heap: create it with "
                          "debug_heap=True, or set GPUMEM_DEBUG_HEAP=1 in the environment")
    return 0


cdef int raise_half_asleep(Arena arena) except -1:
    """Raise for a sleep that was refused half-way, where undoing it was refused too."""
    try:
        raise_refusal(arena)
    except ClosedError:         # the process ends
        raise
    except Exception as refusal:
        raise AsleepError(
            f"arena {arena.name!r} is asleep in part: the driver refused a step of sleep(), and "
            f"then refused to undo the steps before it ({refusal}). The contents of live blocks "
            "are safe; call wake()") from refusal


cdef int raise_refusal(Arena arena) except -1:
    cdef ArenaCore* core = arena.core
    cdef int code = arena_refusal(core)
    if code >= FILE_FAILED:
        raise arena.sleep_file.error(arena.name, code - FILE_FAILED)
    return check(arena_context(core).table, <CUresult>code, arena_refused_call(core).decode())


cdef int raise_source_error(Arena arena, object failure) except -1:
    """Raise the failure of a source's call; None: the driver failed."""
    if failure is None:
        return 0
    # gpumem's own error says enough, and an interrupt must end the program: neither is wrapped.
    if isinstance(failure, SourceError) or not isinstance(failure, Exception):
        raise failure
    raise SourceError(f"the source of arena {arena.name!r} raised "
                      f"{type(failure).__name__}: {failure}") from failure


cdef int raise_out_of_memory(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                             int status, object cause, Pressure pressure) except -1:
    cdef uint64_t rounded = round_to_quantum(asked + extra)
    # The block has a guard before and one after the user's bytes.
    if arena.heap is not None:
        rounded += 2 * heap_settings(arena_heap(arena.core)).guard
    # The remedies depend on which limit was reached.
    reason = "driver"
    if status == ARENA_NO_COPY:
        reason = "copy"
    elif status == ARENA_NO_METADATA:
        reason = "metadata"
    elif rounded >= ABSURD:
        reason = "absurd"
    elif status == ARENA_DRIVER_REFUSED and arena_backing(arena.core).source != NULL:
        reason = "source"
    elif status == ARENA_OVER_LIMIT:
        reason = "limit"
    with kept_mappings:
        error = OutOfMemoryError.of(report_of(arena, asked, rounded, slot, reason, pressure))
    raise error from cause


cdef int raise_over_budget(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                           Pressure pressure) except -1:
    with kept_mappings:
        report = report_of(arena, asked, round_to_quantum(asked + extra), slot, "budget", pressure)
        raise_exceeded(arena_account(arena.core), arena_over_budget(arena.core),
                       [] if pressure is None else pressure.errors, {"report": report})


cdef object report_of(Arena arena, uint64_t asked, uint64_t rounded, uint32_t slot, str reason,
                      Pressure pressure):
    cdef ArenaCore* core = arena.core
    cdef dict figures = refusal_figures(arena, slot)
    if pressure is not None and pressure.collected is not None:
        figures["memory"]["collected"], figures["memory"]["cycles"] = pressure.collected
    # Would pages, which can move, have helped? Then the report suggests them.
    could_move = (not arena_is_paged(core) and arena_backing(core).source == NULL
                  and not pages_problem(arena.memory))
    return reports.out_of_memory(
        str(arena.memory), asked, rounded, arena.name, figures,
        device_figures(arena, arena_context(core), core), reason, could_move,
        GRANULE if arena_is_paged(core) else 0)


# ---- Counters ------------------------------------------------------------------------------------


cdef dict counters_of(Arena arena):
    cdef ArenaCounts counts
    cdef dict found
    arena_counts(arena.core, &counts)
    found = counts
    found["virtual"] = found.pop("spanned")
    return found


# ---- Blocks --------------------------------------------------------------------------------------


cdef list rows_of(Arena arena):
    cdef ArenaCopy copy
    # In the table, cached blocks merge with free memory beside them.
    caches_flush(arena.core)
    require_memory(arena_copy(arena.core, &copy), "copying arena metadata")
    try:
        # Regions of the second table are numbered on from those of the first one.
        return sorted(table_rows(&copy, &copy.tables[0], 0)
                      + table_rows(&copy, &copy.tables[1], copy.tables[0].region_count))
    finally:
        arena_copy_free(&copy)


cdef list table_rows(const ArenaCopy* copy, const TableCopy* table, uint32_t first_region):
    cdef uint32_t region, index
    rows = []
    for region in range(table.region_count):
        index = table.regions[region].first if table.regions[region].size else <uint32_t>NIL
        while index != NIL:
            if table.chunks[index].state != CHUNK_HOLE:
                rows.append(row_of(copy, &table.chunks[index], region + first_region))
            index = table.chunks[index].next
    return rows


cdef tuple row_of(const ArenaCopy* copy, const Chunk* chunk, uint32_t region):
    cdef bint used = chunk.state == CHUNK_USED
    cdef bint pending_free = chunk.state == CHUNK_PENDING_FREE
    # A released chunk belongs to any stream: 0.
    stream = copy.streams[chunk.stream_slot] if used or chunk.stream_slot != SLOT_RELEASED else 0
    return (chunk.address, chunk.requested if used else 0, chunk.size, used, region, stream,
            pending_free)


cdef dict heap_blocks_of(Arena arena):
    cdef uint64_t count = 0
    cdef uint64_t i
    cdef HeapBlock* known
    if arena_heap(arena.core) == NULL:
        return {}
    known = heap_copy(arena_heap(arena.core), True, &count)
    require_memory(known != NULL, "copying a debug heap's metadata")
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


# ---- Sums by state and owner ---------------------------------------------------------------------


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
    cdef FamilyCounts family = family_counts(core)
    return {"stream": <uintptr_t>arena_stream_handle(core, slot),
            "limit": family.limit, "held": family.held,
            "refused_streams": refused_streams(core), "memory": family_memory_of(core, slot)}


cdef tuple refused_streams(ArenaCore* arena):
    # Returns, of all tags, the handles that freed memory waits for, and why the driver recorded no
    # event there.
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
    cdef ArenaCounts counts
    arena_counts_now(arena, &counts)
    total = {} if arena_state(arena) == STATE_ASLEEP else memory_of(arena, slot)
    if total is None:           # out of host memory: the figures that need no copy
        return {"in_use": counts.in_use, "reserved": counts.reserved}
    root = arena_name(arena if arena_parent(arena) == NULL else arena_parent(arena))
    asleep = {}
    cdef ArenaCore* each = tag_next(arena, NULL)
    while each != NULL:
        tag = arena_name(each)[len(root):].removeprefix(", tag ") or "default"
        if arena_state(each) == STATE_ASLEEP:
            arena_counts_now(each, &counts)
            asleep[tag] = counts.asleep_bytes
        elif each != arena:
            # Memory that is free on its streams serves no stream of this one.
            reports.add_memory(total, memory_of(each, SLOT_RELEASED) or {}, tag)
        each = tag_next(arena, each)
    return {**total, "asleep": asleep, "graph_pools": arena_held_by_pools(arena)}


cdef str arena_name(ArenaCore* arena):
    return (<bytes>arena_events(arena).name).decode("utf-8", "replace")


cdef dict memory_of(ArenaCore* arena, uint32_t slot):
    # Returns sums in bytes as the stream of `slot` sees them. None: out of host memory.
    cdef ArenaCopy copy
    cdef ArenaCounts counts
    cdef Sums* sums = <Sums*>calloc(1, sizeof(Sums))
    cdef bint done = False
    if sums == NULL:
        return None
    sums.stream_slot = slot
    # These are 512 KiB, too large for the stack.
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
        found = described(sums, counts.rows_in_use)
        found["reserved"] = copy.reserved
        found["free"] += counts.spanned - min(counts.rows_in_use, counts.spanned)
        return found
    finally:
        if done:
            arena_copy_free(&copy)
        free(sums.by_tag)
        free(sums)


cdef void sum_up(const ArenaCore* arena, ArenaCopy* copy, Sums* sums) noexcept nogil:
    cdef uint32_t small, i
    # Pages are sorted once, so that each free chunk finds its own by bisection.
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
    # The generation shows whether the note is of this block, or of an earlier one there.
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
    # Returns the bytes of the pages that lie wholly in a free chunk.
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

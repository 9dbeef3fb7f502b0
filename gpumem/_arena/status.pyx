"""A refused request: the callbacks that may make room for it, then its exception."""

from threading import get_ident

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena.arena cimport Arena, Region
from gpumem._arena.figures cimport refusal_figures, virtual_in_use
from gpumem._arena.graph_pool cimport end_finished_captures
from gpumem._arena.open cimport pages_problem
from gpumem._arena.source cimport source_error
from gpumem._budget cimport budget_relieve, press, raise_exceeded, Relief, tell_errors
from gpumem._native.arena.api cimport (
    AllocatorHook, arena_account, arena_backing, ARENA_CAPTURING, ARENA_CLOSED, arena_context,
    ARENA_DEAD, ARENA_DRIVER_REFUSED, arena_graphs, ARENA_HALF_ASLEEP, arena_heap, arena_is_paged,
    arena_live_spans, ARENA_NO_COPY, ARENA_NO_METADATA, ARENA_NO_STREAM_SLOT, ARENA_OK,
    ARENA_OVER_BUDGET, arena_over_budget, ARENA_OVER_LIMIT, arena_refusal, arena_refused_call,
    arena_state, ArenaCore, Block, family_limit, heap_settings, hook_allocate, hook_core,
    MAX_STREAMS, slot_drop, slot_retain, STATE_ASLEEP,
)
from gpumem._native.bfc cimport ABSURD, round_to_quantum
from gpumem._native.driver cimport check, CUDA_ERROR_OUT_OF_MEMORY, CUstream
from gpumem._native.pages cimport GRANULE
from gpumem._resource cimport device_figures
from gpumem._support.process cimport report_unraisable

from gpumem.errors import ClosedError, ConfigError, OutOfMemoryError, SourceError, AsleepError


cdef enum:
    MAX_CALLS = 16          # of callbacks, for one request

# (thread, tensor) of callbacks that are running: their own allocations do not call them again.
cdef set relieving = set()


# ---- Callbacks that may make room ----------------------------------------------------------------


cdef int take_under_pressure(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                             Region region, int status, Block* block) except -1:
    # First pools of finished captures end, then callbacks of the arena's own tensors are called,
    # then those of budgets. They may also close the arena or reset the stream: the slot keeps its
    # stream.
    cdef Asking asking = Asking(0, 0)
    cdef Relief relief = Relief(0, 0, 0, 0, NULL, 0, False)
    cdef list errors = []
    slot_retain(arena.core, slot)
    try:
        if end_finished_captures(arena):
            status = arena.take_slow(asked + extra, slot, region, block)
        while tensors_relieve(arena, status, asked, None, &asking):
            status = arena.take_slow(asked + extra, slot, region, block)
        while status == ARENA_OVER_BUDGET and relieve(arena.core, &relief, errors):
            status = arena.take_slow(asked + extra, slot, region, block)
    finally:
        slot_drop(arena.core, slot)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, asked, extra, slot, errors)
    tell_errors(errors)
    if status != ARENA_OK and status != ARENA_CAPTURING:
        raise_status(arena, asked, extra, slot, status)
    return status


cdef int under_pressure(Arena arena,
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


cdef int allocate_under_pressure(AllocatorHook* hook, uint64_t nbytes, CUstream stream,
                                 uint32_t flags, uint64_t* address) noexcept nogil:
    cdef Relief relief = Relief(0, 0, 0, 0, NULL, 0, False)
    cdef ArenaCore* core = hook_core(hook)
    cdef int status = ARENA_OVER_BUDGET
    while status == ARENA_OVER_BUDGET and budget_relieve(arena_account(core),
                                                         arena_over_budget(core), &relief):
        status = hook_allocate(hook, nbytes, stream, flags, address)
    return status


cdef bint relieve(ArenaCore* core, Relief* relief, list errors) except -1:
    return press(arena_account(core), arena_over_budget(core), relief, errors)


cdef bint tensors_relieve(Arena arena, int status, uint64_t nbytes, object but,
                          Asking* asking) except -1:
    cdef uint64_t used
    if status not in (ARENA_OVER_LIMIT, ARENA_OVER_BUDGET, ARENA_DRIVER_REFUSED):
        return False
    while asking.reliever < len(arena.relievers) and asking.calls < MAX_CALLS:
        tensor = arena.relievers[asking.reliever]()
        used = virtual_in_use(arena.core)
        if tensor is not None and tensor is not but:
            asking.calls += 1
            call_reliever(tensor, nbytes)
        # Its callback is called again as long as it releases rows.
        if virtual_in_use(arena.core) < used:
            return True
        asking.reliever += 1
    return False


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


# ---- The exception -------------------------------------------------------------------------------


cdef int raise_status(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                      int status) except -1:
    # First the states of the arena, in which no figures may be read.
    if status == ARENA_DEAD:
        raise ClosedError(f"arena {arena.name!r} belongs to the parent process, or the "
                          "interpreter is ending")
    if status == ARENA_CLOSED and arena_state(arena.core) == STATE_ASLEEP:
        raise_asleep(arena)
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
    if status == ARENA_DRIVER_REFUSED and arena_refusal(arena.core) != CUDA_ERROR_OUT_OF_MEMORY:
        raise_source_error(arena, failure)
        raise_refusal(arena.core)
    raise_out_of_memory(arena, asked, extra, slot, status, failure)


cdef int raise_asleep(Arena arena) except -1:
    raise AsleepError(f"arena {arena.name!r} is asleep: wake() restores its memory")


cdef int raise_in_use(Arena arena) except -1:
    from gpumem._arena import reports
    live = arena.heap.live_text() if arena.heap is not None else ""
    raise reports.in_use_error(arena.name, arena.stats(), arena_graphs(arena.core),
                               arena_live_spans(arena.core), live)


cdef int require_heap(Arena arena) except -1:
    if arena.heap is None:
        raise ConfigError(f"arena {arena.name!r} has no debug heap: create it with "
                          "debug_heap=True, or set GPUMEM_DEBUG_HEAP=1 in the environment")
    return 0


cdef int raise_half_asleep(Arena arena) except -1:
    """Raise for a sleep that was refused half-way, where undoing it was refused too."""
    try:
        raise_refusal(arena.core)
    except Exception as refusal:
        raise AsleepError(
            f"arena {arena.name!r} is asleep in part: the driver refused a step of sleep(), and "
            f"then refused to undo the steps before it ({refusal}). The contents of live blocks "
            "are safe; call wake()") from refusal


cdef int raise_refusal(ArenaCore* core) except -1:
    return check(arena_context(core).table, arena_refusal(core), arena_refused_call(core).decode())


cdef int raise_source_error(Arena arena, object failure) except -1:
    """Raise the failure of a source's call; None: the driver failed."""
    if failure is None:
        return 0
    # Neither is wrapped: a program must be able to end, and gpumem's own error says enough.
    if isinstance(failure, SourceError) or not isinstance(failure, Exception):
        raise failure           # raised by gpumem, or an interrupt of the program
    raise SourceError(f"the source of arena {arena.name!r} raised "
                      f"{type(failure).__name__}: {failure}") from failure


cdef int raise_out_of_memory(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                             int status, object cause) except -1:
    cdef uint64_t rounded = round_to_quantum(asked + extra)
    # The block has a guard before and one after the user's bytes.
    if arena.heap is not None:
        rounded += 2 * heap_settings(arena_heap(arena.core)).guard
    # The remedies depend on which limit was reached.
    reason = "driver"
    if status == ARENA_NO_COPY:
        reason = "copy"
    elif rounded >= ABSURD:
        reason = "absurd"
    elif status == ARENA_OVER_LIMIT:
        has_limit = family_limit(arena.core) != 0
        reason = "limit" if has_limit else "addresses"
    raise OutOfMemoryError.of(report_of(arena, asked, rounded, slot, reason)) from cause


cdef int raise_over_budget(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                           list errors) except -1:
    report = report_of(arena, asked, round_to_quantum(asked + extra), slot, "budget")
    raise_exceeded(arena_account(arena.core), arena_over_budget(arena.core), errors,
                   {"report": report})


cdef object report_of(Arena arena, uint64_t asked, uint64_t rounded, uint32_t slot, str reason):
    cdef ArenaCore* core = arena.core
    from gpumem._arena import reports
    # Would pages, which can move, have helped? Then the report suggests them.
    could_move = (not arena_is_paged(core) and arena_backing(core).source == NULL
                  and not pages_problem(arena.memory))
    return reports.out_of_memory(
        str(arena.memory), asked, rounded, arena.name, refusal_figures(arena, slot),
        device_figures(arena, arena_context(core), core), reason, could_move,
        GRANULE if arena_is_paged(core) else 0)

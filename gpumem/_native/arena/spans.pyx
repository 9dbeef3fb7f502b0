"""Spans of an arena: their charges, and releases behind queued work."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._native.arena.bookkeeping cimport (
    arena_charge, arena_reconcile, arena_room, charge_request, count_out, note_reserved,
)
from gpumem._native.arena.streams cimport (
    release_completed, slot_drop, uses_done, uses_release,
)
from gpumem._native.arena.thread_cache cimport caches_flush
from gpumem._native.arena.types cimport (
    ARENA_CLOSED, arena_in_use, arena_max_in_use, ARENA_NO_METADATA, ARENA_OK, ARENA_OVER_BUDGET,
    ARENA_OVER_LIMIT, ArenaCore, ArenaSpan, driver_refused, stamp_free,
)
from gpumem._native.bfc cimport SLOT_RELEASED
from gpumem._native.driver cimport (
    context_enter, context_leave, context_relax, context_restore, CUDA_SUCCESS, CUresult,
    CUstreamCaptureMode,
)
from gpumem._native.pages cimport (
    Span, span_free, span_lacks, SPAN_LEAVING, span_map, span_page_bytes, span_settle, SPAN_SPARE,
    span_unmap, SPAN_USED,
)
from gpumem._support.atomics cimport store64
from gpumem._support.lease cimport Uses, uses_add, uses_free
from gpumem._support.lock cimport lock_acquire, lock_release


# ---- more ----------------------------------------------------------------------------------------

cdef int span_take(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil:
    # Charged before the driver is called: a refusal must not cost a driver call.
    cdef ArenaCore* arena = span.arena
    cdef uint64_t missing = span_lacks(&span.pages, first, last)
    cdef uint64_t used = bytes_without(&span.pages, first, spare)
    cdef const char* call = "cuCtxPushCurrent"
    cdef CUresult code
    if span.closed or arena.closed:
        return ARENA_CLOSED
    if missing > arena_room(arena):
        return ARENA_OVER_LIMIT
    if arena.in_use_account != NULL and used and not charge_request(arena, used):
        return ARENA_OVER_BUDGET
    if not arena_charge(arena, missing):
        return ARENA_OVER_BUDGET
    code = context_enter(arena.context)
    if code == CUDA_SUCCESS:
        code = span_map(&span.pages, first, last, &call)
        context_leave(arena.context)
    if code == CUDA_SUCCESS:
        take_pages(&span.pages, first, spare, last)
    elif arena.in_use_account != NULL:
        count_out(arena, used)
    count_spans(arena)
    arena_reconcile(arena)
    return ARENA_OK if code == CUDA_SUCCESS else driver_refused(arena, code, call)


cdef uint64_t bytes_without(const Span* span, uint32_t first, uint32_t last) noexcept nogil:
    # Of pages that are not in use.
    cdef uint64_t nbytes = 0
    cdef uint32_t i
    for i in range(first, last):
        if span.page[i].state != SPAN_USED:
            nbytes += span_page_bytes(span, i)
    return nbytes


cdef void take_pages(Span* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil:
    cdef uint32_t i
    span.used += bytes_without(span, first, spare)
    for i in range(first, last):
        span.leaving -= span.page[i].state == SPAN_LEAVING
        if i < spare:
            span.page[i].state = SPAN_USED
        elif span.page[i].state != SPAN_USED:
            span.page[i].state = SPAN_SPARE


cdef void count_spans(ArenaCore* arena) noexcept nogil:
    # The sums of all spans, and the peaks. Under the arena lock, so that figures read there are of
    # one moment.
    cdef uint64_t held = 0
    cdef uint64_t used = 0
    cdef const ArenaSpan* span = arena.spans
    while span != NULL:
        held += span.pages.held
        used += span.pages.used
        span = span.next
    if used != arena.span_used:
        caches_flush(arena)     # cached blocks count as used
    lock_acquire(&arena.lock)
    store64(&arena.spanned, held)
    if used != arena.span_used:
        # Blocks have their peak with what spans had in use until now, and begin anew.
        store64(&arena.span_peak, arena_max_in_use(arena))
        arena.block_peak = max(arena.block_peak, arena.stats.max_in_use)
        store64(&arena.stats.max_in_use, arena_in_use(arena))
        store64(&arena.span_used, used)
    note_reserved(arena)
    lock_release(&arena.lock)


# ---- less ----------------------------------------------------------------------------------------

cdef int span_release(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                      uint32_t spare_end) noexcept nogil:
    # Host memory first: nothing is changed without it.
    cdef ArenaCore* arena = span.arena
    cdef Uses* uses = <Uses*>calloc(1, sizeof(Uses))
    cdef CUstreamCaptureMode mode
    cdef uint64_t used
    if uses == NULL or not copy_slots(span, uses):
        uses_free(uses)
        return ARENA_NO_METADATA
    mode = context_relax(arena.context)
    lock_acquire(&arena.grow_lock)
    used = span.pages.used
    if leave(span, first, last, spare, spare_end, span.releases + 1):
        lock_acquire(&arena.lock)
        span_stamp(span, uses)
        lock_release(&arena.lock)
    else:
        uses_free(uses)
    if arena.in_use_account != NULL:
        count_out(arena, used - span.pages.used)
    spans_poll(arena)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return ARENA_OK


cdef bint copy_slots(ArenaSpan* span, Uses* uses) noexcept nogil:
    # Room for every stream of the span; a stamp takes those that there are then.
    cdef uint32_t i
    cdef bint added
    cdef bint done
    lock_acquire(&span.arena.lock)
    done = uses_add(&uses, span.stream_slot, &added)
    if span.uses != NULL:
        for i in range(span.uses.count):
            done = done and uses_add(&uses, span.uses.at[i].slot, &added)
    lock_release(&span.arena.lock)
    return done


cdef bint leave(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                uint32_t spare_end, uint64_t release) noexcept nogil:
    # Does any page?
    cdef Span* pages = &span.pages
    cdef uint32_t i
    cdef bint any_page = False
    for i in range(pages.count):
        if first <= i < last and pages.page[i].state == SPAN_USED:
            pages.used -= span_page_bytes(pages, i)
            pages.page[i].state = SPAN_SPARE
        if pages.page[i].state == SPAN_SPARE and not spare <= i < spare_end:
            pages.page[i].state = SPAN_LEAVING
            pages.page[i].release = release
            pages.leaving += 1
            any_page = True
    return any_page


cdef void span_stamp(ArenaSpan* span, Uses* uses) noexcept nogil:
    # What is queued now on the span's streams is the last that may use what
    # leaves. A silent stream was drained; its own one is stamped in any case, as a block's is.
    cdef ArenaCore* arena = span.arena
    cdef uint32_t i, slot
    cdef uint32_t left = 0
    span.releases += 1
    uses.handle = span.releases
    for i in range(uses.count):
        slot = uses.at[i].slot
        if arena.streams[slot].silent and slot != span.stream_slot:
            continue
        uses.at[left].slot = slot
        uses.at[left].until = stamp_free(&arena.streams[slot])
        arena.streams[slot].pending_frees += 1
        left += 1
    uses.count = left
    uses.next = NULL
    if span.leaving == NULL:
        span.leaving = uses
    else:
        span.newest.next = uses
    span.newest = uses


cdef uint64_t spans_trim(ArenaCore* arena) noexcept nogil:
    cdef uint64_t before = arena.spanned
    cdef ArenaSpan* span = arena.spans
    cdef Uses* uses
    while span != NULL:
        # Without host memory for it, spare pages stay.
        uses = <Uses*>calloc(1, sizeof(Uses))
        if uses != NULL and copy_slots(span, uses) and leave(span, 0, 0, 0, 0,
                                                             span.releases + 1):
            lock_acquire(&arena.lock)
            span_stamp(span, uses)
            lock_release(&arena.lock)
        else:
            uses_free(uses)
        span = span.next
    spans_poll(arena)
    return before - arena.spanned


cdef void spans_poll(ArenaCore* arena) noexcept nogil:
    # With the grow lock. An event is recorded behind the work of each release at the first look.
    cdef ArenaSpan* span = arena.spans
    cdef bint waits = False
    while span != NULL:
        waits = waits or span.leaving != NULL
        span = span.next
    if waits:
        release_completed(arena, SLOT_RELEASED)
    spans_sweep(arena)


cdef void spans_sweep(ArenaCore* arena) noexcept nogil:
    cdef ArenaSpan** link = &arena.spans
    cdef ArenaSpan* span
    if link[0] == NULL or context_enter(arena.context) != CUDA_SUCCESS:
        return
    while link[0] != NULL:
        span = link[0]
        if finish_releases(span):
            end_use(span)
        if span.pages.leaving:
            span_unmap(&span.pages, span.done)
        if is_over(span) and span_free(&span.pages):
            link[0] = span.next
            slot_drop(arena, span.stream_slot)
            if span.uses != NULL:
                uses_release(arena, span.uses)
            free(span)
        else:
            link = &span.next
    context_leave(arena.context)
    count_spans(arena)
    arena_reconcile(arena)


cdef bint finish_releases(ArenaSpan* span) noexcept nogil:
    # Notes the latest release that is done, with all before it. True: the span has ended.
    cdef ArenaCore* arena = span.arena
    cdef Uses* uses
    cdef uint32_t i
    cdef bint ended
    lock_acquire(&arena.lock)
    while span.leaving != NULL and uses_done(arena, span.leaving):
        uses = span.leaving
        span.leaving = uses.next
        span.done = uses.handle
        for i in range(uses.count):
            arena.streams[uses.at[i].slot].pending_frees -= 1
        uses_free(uses)
    ended = span.end == NULL
    lock_release(&arena.lock)
    return ended


cdef void end_use(ArenaSpan* span) noexcept nogil:
    # Its last reference was stamped: every page leaves in that release.
    cdef uint64_t used = span.pages.used
    leave(span, 0, span.pages.count, 0, 0, span.releases)
    if span.arena.in_use_account != NULL:
        count_out(span.arena, used - span.pages.used)


cdef inline bint is_over(const ArenaSpan* span) noexcept nogil:
    return span.end == NULL and span.leaving == NULL and span.pages.held == 0


cdef void spans_settle(ArenaCore* arena) noexcept nogil:
    cdef ArenaSpan* span = arena.spans
    while span != NULL:
        span_settle(&span.pages)
        span = span.next
    count_spans(arena)


cdef void spans_forget(ArenaCore* arena) noexcept nogil:
    # What the driver did not take back is lost, as the arena's own memory is.
    cdef ArenaSpan* span
    while arena.spans != NULL:
        span = arena.spans
        arena.spans = span.next
        span_forget(span)


cdef void span_forget(ArenaSpan* span) noexcept nogil:
    cdef Uses* uses
    while span.leaving != NULL:
        uses = span.leaving
        span.leaving = uses.next
        uses_free(uses)
    uses_free(span.uses)
    uses_free(span.end)
    free(span)

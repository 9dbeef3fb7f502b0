"""The life of a span, its views, and a commit with every step that makes room for it."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._native.arena.arena cimport arenas_release_retired
from gpumem._native.arena.family cimport arena_drop, arena_retain
from gpumem._native.arena.growth cimport memory_is_out, shrink_may_help, wait_for_streams
from gpumem._native.arena.release cimport release_all_idle
from gpumem._native.arena.spans cimport (
    OF_ALL, OF_NOTHING, span_note, span_release, span_stamp, span_take, spans_poll, spans_sweep,
)
from gpumem._native.arena.streams cimport find_idle, slot_retain
from gpumem._native.arena.types cimport (
    ALLOCATE_INTERRUPTIBLE, ARENA_DEAD, ARENA_IN_USE, ARENA_NO_METADATA, ARENA_OK, ARENA_OVER_LIMIT,
    ArenaCore, ArenaSpan, driver_refused, SpanView,
)
from gpumem._native.bfc cimport SLOT_RELEASED
from gpumem._native.driver cimport (
    context_is_dead, context_relax, context_restore, CUDA_SUCCESS, CUresult, CUstreamCaptureMode,
)
from gpumem._native.pages cimport Span, span_lacks, span_reserve
from gpumem._support.atomics cimport count_add, load32, load64, store32
from gpumem._support.lease cimport uses_free, uses_reserve
from gpumem._support.lock cimport lock_acquire, lock_init, lock_release


# ---- a commit ------------------------------------------------------------------------------------

cdef int span_commit(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last,
                     Lack* lack) noexcept nogil:
    # The steps of an allocation that reaches the driver, see slow_path.
    cdef ArenaCore* arena = span.arena
    cdef CUstreamCaptureMode mode
    cdef int status
    lack.missing = 0
    lack.completions = load64(&arena.completions)
    if context_is_dead(arena.context):
        return ARENA_DEAD
    mode = context_relax(arena.context)
    arenas_release_retired()
    lock_acquire(&arena.grow_lock)
    lack.missing = span_lacks(&span.pages, first, spare)
    status = take_ahead(span, first, spare, last)
    if lack.missing and shrink_may_help(arena, lack.missing, status):
        find_idle(arena)
        release_all_idle(arena)
        status = span_take(span, first, spare, spare)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return status


cdef int span_wait(ArenaSpan* span, int status, const Lack* lack, uint64_t* until) noexcept nogil:
    cdef int waited
    if lack.missing == 0 or not memory_is_out(span.arena, lack.missing, status):
        return status
    # Another thread's release may have ended since the commit was refused.
    if load64(&span.arena.completions) != lack.completions:
        return ARENA_OK
    waited = wait_for_streams(span.arena, lack.missing, SLOT_RELEASED, ALLOCATE_INTERRUPTIBLE,
                              until)
    return status if waited == ARENA_OVER_LIMIT else waited


cdef int take_ahead(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil:
    # Without the memory ahead, if that is refused. A commit that lacks nothing takes none.
    cdef int status = ARENA_IN_USE
    if span_lacks(&span.pages, first, spare) == 0:
        last = spare
    spans_poll(span.arena)
    if last > spare:
        status = span_take(span, first, spare, last)
    return span_take(span, first, spare, spare) if status != ARENA_OK else status


# ---- life ----------------------------------------------------------------------------------------

cdef int span_open(ArenaCore* arena, uint64_t nbytes, uint64_t page_bytes, uint32_t stream_slot,
                   ArenaSpan** out) noexcept nogil:
    cdef ArenaSpan* span = <ArenaSpan*>calloc(1, sizeof(ArenaSpan))
    cdef const char* call = NULL
    cdef CUresult code
    out[0] = span
    if span == NULL:
        return ARENA_NO_METADATA
    if not uses_reserve(&span.end, 1):
        free(span)
        return ARENA_NO_METADATA
    span.pages.context = arena.context
    span.pages.access = &arena.access
    span.pages.calls = &arena.backing.calls
    span.pages.events = &arena.events
    code = span_reserve(&span.pages, nbytes, page_bytes, &call)
    if code != CUDA_SUCCESS:
        uses_free(span.end)
        free(span)
        return driver_refused(arena, code, call) if call != NULL else ARENA_NO_METADATA
    lock_init(&span.lock)
    span.arena = arena
    span.references = 1
    span.stream_slot = stream_slot
    slot_retain(arena, stream_slot)
    arena_retain(arena)
    lock_acquire(&arena.grow_lock)
    spans_sweep(arena)
    lock_acquire(&arena.lock)
    span.next = arena.spans
    arena.spans = span
    lock_release(&arena.lock)
    count_add(&arena.live_spans, 1)
    lock_release(&arena.grow_lock)
    return ARENA_OK


cdef int span_close(ArenaSpan* span) noexcept nogil:
    cdef int status
    lock_acquire(&span.lock)
    if span.views != NULL:
        lock_release(&span.lock)
        return ARENA_IN_USE
    store32(&span.closed, True)
    lock_release(&span.lock)
    status = span_release(span, 0, span.pages.count, 0, 0, NULL)
    if status == ARENA_OK:
        count_add(&span.arena.live_spans, -1)
    else:
        store32(&span.closed, False)
    return status


cdef void span_drop(ArenaSpan* span) noexcept nogil:
    cdef ArenaCore* arena = span.arena
    if count_add(&span.references, -1) != 0 or context_is_dead(arena.context):
        return
    # A stamp needs no memory here: this may be a finalizer. Once it is there, another thread may
    # forget the span. The pages of a closed one are behind the close.
    if not load32(&span.closed):
        count_add(&arena.live_spans, -1)
    lock_acquire(&arena.lock)
    span_stamp(span, span.end, OF_NOTHING if load32(&span.closed) else OF_ALL)
    span.last = span.releases
    span.end = NULL
    lock_release(&arena.lock)
    arena_drop(arena)


cdef int span_record(ArenaSpan* span, uint32_t stream_slot, uint64_t first,
                     uint64_t last) noexcept nogil:
    cdef Span* pages = &span.pages
    cdef bint done
    cdef uint64_t behind = (last + pages.page_bytes - 1) // pages.page_bytes
    lock_acquire(&span.arena.lock)
    done = span_note(span, stream_slot, <uint32_t>(first // pages.page_bytes),
                     <uint32_t>behind if last > first else <uint32_t>(first // pages.page_bytes))
    lock_release(&span.arena.lock)
    return ARENA_OK if done else ARENA_NO_METADATA


# ---- views ---------------------------------------------------------------------------------------

cdef SpanView* span_view(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil:
    cdef SpanView* view = <SpanView*>calloc(1, sizeof(SpanView))
    if view == NULL:
        return NULL
    view.span = span
    view.first = first
    view.last = last
    lock_acquire(&span.lock)
    if load32(&span.closed):
        lock_release(&span.lock)
        free(view)
        return NULL
    if first != last:
        view.link = &span.views
        view.next = span.views
        if view.next != NULL:
            view.next.link = &view.next
        span.views = view
    count_add(&span.references, 1)
    lock_release(&span.lock)
    return view


cdef void span_view_end(void* ended) noexcept nogil:
    cdef SpanView* view = <SpanView*>ended
    cdef ArenaSpan* span = view.span
    # In a fork's child the lock may be another thread's of the parent.
    if context_is_dead(span.arena.context):
        return
    lock_acquire(&span.lock)
    if view.link != NULL:
        view.link[0] = view.next
        if view.next != NULL:
            view.next.link = view.link
    lock_release(&span.lock)
    free(view)
    span_drop(span)


cdef bint span_is_held(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil:
    cdef const SpanView* view
    cdef bint held = False
    lock_acquire(&span.lock)
    view = span.views
    while view != NULL and not held:
        held = view.first < last and first < view.last
        view = view.next
    lock_release(&span.lock)
    return held

"""Spans of an arena: their charges, releases after queued work, their life and their views."""

from libc.stdint cimport uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free

from gpumem._native.arena.bookkeeping cimport (
    arena_charge, arena_reconcile, charge_request, count_out, note_event, note_reserved,
)
from gpumem._native.arena.family cimport arena_drop, arena_retain
from gpumem._native.arena.streams cimport release_completed, slot_drop, slot_retain, uses_done
from gpumem._native.arena.thread_cache cimport caches_flush
from gpumem._native.arena.types cimport (
    arena_admits, ARENA_CLOSED, ARENA_IN_USE, arena_in_use, arena_max_in_use, ARENA_NO_METADATA,
    ARENA_OK, ARENA_OVER_BUDGET, ArenaCore, ArenaSpan, driver_refused, SpanNote, SpanView,
    stamp_free, STREAM_DRAINED,
)
from gpumem._native.bfc cimport SLOT_RELEASED
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, context_relax, context_restore, CUDA_SUCCESS,
    CUresult, CUstreamCaptureMode,
)
from gpumem._native.pages cimport (
    Span, span_free, span_lacks, SPAN_LEAVING, span_map, span_page_at, span_page_bytes,
    span_page_in_use, span_reserve, span_settle, SPAN_SPARE, span_unmap, SPAN_USED, SpanPage,
)
from gpumem._support.atomics cimport count_add, load32, locked_raise64, store32, store64
from gpumem._support.events cimport (
    FRAMEWORK_VIRTUAL, is_recorded, REC_ALLOC, REC_FREE, thread_set_framework,
)
from gpumem._support.lease cimport Uses, uses_free, uses_reserve
from gpumem._support.lock cimport lock_acquire, lock_init, lock_release
from gpumem._support.memory cimport array_reserve


# ---- commit --------------------------------------------------------------------------------------

cdef int span_take(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil:
    # Charged before the driver is called: a refusal must not cost a driver call.
    cdef ArenaCore* arena = span.arena
    cdef uint64_t missing = span_lacks(&span.pages, first, last)
    cdef uint64_t used = bytes_without(&span.pages, first, spare)
    cdef const char* call = "cuCtxPushCurrent"
    cdef CUresult code
    cdef int status
    status = ARENA_CLOSED if load32(&span.closed) else arena_admits(arena)
    if status == ARENA_OK:
        status = arena_charge(arena, missing)
    if status != ARENA_OK:
        return status
    if arena.in_use_level != NULL and used and not charge_request(arena, used):
        arena_reconcile(arena)
        return ARENA_OVER_BUDGET
    code = context_enter(arena.context)
    if code == CUDA_SUCCESS:
        code = span_map(&span.pages, first, last, &call)
        context_leave(arena.context)
    if code == CUDA_SUCCESS:
        lock_acquire(&arena.lock)
        take_pages(span, first, spare, last)
        lock_release(&arena.lock)
    elif arena.in_use_level != NULL:
        count_out(arena, used)
    count_spans(arena)
    arena_reconcile(arena)
    return ARENA_OK if code == CUDA_SUCCESS else driver_refused(arena, code, call)


cdef uint64_t bytes_without(const Span* span, uint32_t first, uint32_t last) noexcept nogil:
    # Adds up the bytes of pages that are not in use.
    cdef uint64_t nbytes = 0
    cdef uint32_t i
    for i in range(first, last):
        if not span_page_in_use(&span.page[i]):
            nbytes += span_page_bytes(span, i)
    return nbytes


cdef void take_pages(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil:
    # Caller holds `lock`, as for every change of the pages in use: copies of metadata read them.
    cdef Span* pages = &span.pages
    cdef uint32_t i
    pages.used += bytes_without(pages, first, spare)
    for i in range(first, last):
        pages.leaving -= pages.page[i].state == SPAN_LEAVING
        if span_page_in_use(&pages.page[i]):
            continue
        pages.page[i].state = SPAN_USED if i < spare else SPAN_SPARE
        if i < spare:
            note_block(span, REC_ALLOC, i)


cdef void note_block(ArenaSpan* span, uint32_t kind, uint32_t page) noexcept nogil:
    # A page in use counts as a block. Its owner is the context's tag, otherwise all virtual tensors
    # together: under a lock no stack is recorded.
    cdef uint64_t nbytes = span_page_bytes(&span.pages, page)
    cdef uint8_t before
    if is_recorded(&span.arena.events):
        before = thread_set_framework(FRAMEWORK_VIRTUAL)
        note_event(span.arena, kind, span_page_at(&span.pages, page), nbytes, nbytes,
                   span.stream_slot, False)
        thread_set_framework(before)


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
        locked_raise64(&arena.block_peak, arena.stats.max_in_use)
        store64(&arena.stats.max_in_use, arena_in_use(arena))
        store64(&arena.span_used, used)
    note_reserved(arena)
    lock_release(&arena.lock)


# ---- release -------------------------------------------------------------------------------------

cdef int span_release(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                      uint32_t spare_end, Uses* room) noexcept nogil:
    # Host memory first: nothing is changed without it.
    cdef ArenaCore* arena = span.arena
    cdef Uses* uses = room_for_streams(span, room)
    cdef CUstreamCaptureMode mode
    cdef uint64_t used
    if uses == NULL:
        return ARENA_NO_METADATA
    mode = context_relax(arena.context)
    lock_acquire(&arena.grow_lock)
    used = span.pages.used
    leave_or_free(span, first, last, spare, spare_end, uses)
    if arena.in_use_level != NULL:
        count_out(arena, used - span.pages.used)
    spans_poll(arena)
    lock_release(&arena.grow_lock)
    context_restore(arena.context, mode)
    return ARENA_OK


cdef Uses* room_for_streams(ArenaSpan* span, Uses* uses) noexcept nogil:
    # For every stream of the span; a stamp takes those that use what leaves. `uses`: room that was
    # made earlier, or NULL. Returns NULL, and frees it, where the host has no memory.
    cdef bint is_ready
    lock_acquire(&span.arena.lock)
    is_ready = uses_reserve(&uses, span.note_count + 1)
    lock_release(&span.arena.lock)
    if not is_ready:
        uses_free(uses)
        uses = NULL
    return uses


cdef void leave_or_free(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                        uint32_t spare_end, Uses* uses) noexcept nogil:
    # The room is freed where no page leaves.
    lock_acquire(&span.arena.lock)
    if leave(span, first, last, spare, spare_end, span.releases + 1):
        span_stamp(span, uses, OF_PAGES)
        uses = NULL
    lock_release(&span.arena.lock)
    uses_free(uses)


cdef bint leave(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                uint32_t spare_end, uint64_t release) noexcept nogil:
    # Caller holds `lock`. Returns whether any page is now leaving.
    cdef Span* pages = &span.pages
    cdef uint32_t i
    cdef bint any_page = False
    for i in range(pages.count):
        if first <= i < last and span_page_in_use(&pages.page[i]):
            pages.used -= span_page_bytes(pages, i)
            pages.page[i].state = SPAN_SPARE
            note_block(span, REC_FREE, i)
        if pages.page[i].state == SPAN_SPARE and not spare <= i < spare_end:
            pages.page[i].state = SPAN_LEAVING
            pages.page[i].release = release
            pages.leaving += 1
            any_page = True
    return any_page


cdef void span_stamp(ArenaSpan* span, Uses* uses, StampOf of) noexcept nogil:
    # Work that is queued now is the last that may use the pages that leave. A stream that another
    # thread noted after room was made for all streams is not ordered before this.
    cdef ArenaCore* arena = span.arena
    cdef const SpanNote* note
    cdef uint32_t i
    span.releases += 1
    uses.handle = span.releases
    uses.count = 0
    if of != OF_NOTHING:
        stamp_stream(arena, uses, span.stream_slot)     # in any case, as of a block
    for i in range(span.note_count if of != OF_NOTHING else 0):
        note = &span.notes[i]
        if (note.slot != span.stream_slot and uses.count < uses.capacity
                and arena.streams[note.slot].state != STREAM_DRAINED
                and (of == OF_ALL or note.whole or uses_leaving(span, note, uses.handle))):
            stamp_stream(arena, uses, note.slot)
    uses.next = span.leaving
    span.leaving = uses


cdef void stamp_stream(ArenaCore* arena, Uses* uses, uint32_t slot) noexcept nogil:
    uses.at[uses.count].slot = slot
    uses.at[uses.count].until = stamp_free(&arena.streams[slot])
    arena.streams[slot].pending_frees += 1
    uses.count += 1


cdef bint uses_leaving(const ArenaSpan* span, const SpanNote* note,
                       uint64_t release) noexcept nogil:
    cdef uint32_t i
    for i in range(span.pages.count):
        if note.page[i] and leaves_in(&span.pages.page[i], release):
            return True
    return False


cdef inline bint leaves_in(const SpanPage* page, uint64_t release) noexcept nogil:
    return page.state == SPAN_LEAVING and page.release == release


cdef uint64_t spans_trim(ArenaCore* arena) noexcept nogil:
    cdef uint64_t before = arena.spanned
    cdef ArenaSpan* span = arena.spans
    cdef Uses* uses
    while span != NULL:
        # Without host memory for it, spare pages stay.
        uses = room_for_streams(span, NULL)
        if uses != NULL:
            leave_or_free(span, 0, 0, 0, 0, uses)
        span = span.next
    spans_poll(arena)
    return before - arena.spanned


cdef void spans_poll(ArenaCore* arena) noexcept nogil:
    # Caller holds `grow_lock`. The first poll of a release records an event after its work.
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
        finish_releases(span)
        if span.pages.leaving:
            span_unmap(&span.pages)
        if is_over(span) and span_free(&span.pages):
            lock_acquire(&arena.lock)
            link[0] = span.next
            lock_release(&arena.lock)
            slot_drop(arena, span.stream_slot)
            span_forget(span)
        else:
            link = &span.next
    context_leave(arena.context)
    count_spans(arena)
    arena_reconcile(arena)


cdef void finish_releases(ArenaSpan* span) noexcept nogil:
    # In any order: each waits for the streams that use its own pages. Once the last reference was
    # stamped, every page leaves in that release.
    cdef ArenaCore* arena = span.arena
    cdef Uses** link = &span.leaving
    cdef Uses* uses
    cdef uint64_t used = span.pages.used
    cdef uint32_t i
    lock_acquire(&arena.lock)
    if span.last:
        leave(span, 0, span.pages.count, 0, 0, span.last)
    while link[0] != NULL:
        uses = link[0]
        if not uses_done(arena, uses):
            link = &uses.next
            continue
        link[0] = uses.next
        for i in range(uses.count):
            arena.streams[uses.at[i].slot].pending_frees -= 1
        for i in range(span.pages.count):
            if leaves_in(&span.pages.page[i], uses.handle):
                span.pages.page[i].release = 0
                forget_uses(span, i)
        uses_free(uses)
    lock_release(&arena.lock)
    if arena.in_use_level != NULL:
        count_out(arena, used - span.pages.used)


cdef inline bint is_over(const ArenaSpan* span) noexcept nogil:
    return span.last != 0 and span.leaving == NULL and span.pages.held == 0


# ---- streams that use pages ----------------------------------------------------------------------

cdef bint span_note(ArenaSpan* span, uint32_t stream_slot, uint32_t first,
                    uint32_t last) noexcept nogil:
    # Room for it in the last release, too, which may be a finalizer's.
    cdef SpanNote* note
    cdef uint32_t i
    forget_drained(span, stream_slot)
    note = find_note(span, stream_slot)
    if note == NULL:
        note = add_note(span, stream_slot)
    if note == NULL:
        return False
    note.whole = note.whole or first == last
    for i in range(first, last):
        note.count += not note.page[i]
        note.page[i] = 1
    return True


cdef SpanNote* find_note(const ArenaSpan* span, uint32_t stream_slot) noexcept nogil:
    cdef uint32_t i
    for i in range(span.note_count):
        if span.notes[i].slot == stream_slot:
            return &span.notes[i]
    return NULL


cdef SpanNote* add_note(ArenaSpan* span, uint32_t stream_slot) noexcept nogil:
    cdef SpanNote* note
    if not uses_reserve(&span.end, span.note_count + 2):
        return NULL
    if not array_reserve(<void**>&span.notes, &span.note_capacity, span.note_count + 1, 2,
                         sizeof(SpanNote)):
        return NULL
    note = &span.notes[span.note_count]
    note.page = <uint8_t*>calloc(span.pages.count, 1)
    if note.page == NULL:
        return NULL
    note.slot = stream_slot
    note.whole = False
    note.count = 0
    slot_retain(span.arena, stream_slot)
    span.note_count += 1
    return note


cdef void forget_uses(ArenaSpan* span, uint32_t page) noexcept nogil:
    # The page has left. Notes of no page end; the last one takes the place of one that ends.
    cdef uint32_t i = span.note_count
    cdef SpanNote* note
    while i:
        i -= 1
        note = &span.notes[i]
        note.count -= note.page[page]
        note.page[page] = 0
        if note.count == 0 and not note.whole:
            forget_note(span, i)


cdef void forget_drained(ArenaSpan* span, uint32_t named) noexcept nogil:
    # Streams that were reset, and may have ended.
    cdef uint32_t i = span.note_count
    cdef uint32_t slot
    while i:
        i -= 1
        slot = span.notes[i].slot
        if slot != named and span.arena.streams[slot].state == STREAM_DRAINED:
            forget_note(span, i)


cdef void forget_note(ArenaSpan* span, uint32_t number) noexcept nogil:
    slot_drop(span.arena, span.notes[number].slot)
    free(span.notes[number].page)
    span.note_count -= 1
    span.notes[number] = span.notes[span.note_count]


# ---- sleep, and the arena's end ------------------------------------------------------------------


cdef void spans_settle(ArenaCore* arena) noexcept nogil:
    cdef ArenaSpan* span = arena.spans
    while span != NULL:
        span_settle(&span.pages)
        span = span.next
    count_spans(arena)


cdef void spans_forget(ArenaCore* arena) noexcept nogil:
    # Memory that the driver refused to release is lost, as the arena's own memory is.
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
    while span.note_count:
        forget_note(span, span.note_count - 1)
    free(span.notes)
    uses_free(span.end)
    free(span)


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
    # forget the span. Pages of a closed span leave with its close.
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

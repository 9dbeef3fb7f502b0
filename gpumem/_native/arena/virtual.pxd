"""Spans as virtual tensors have them: made, committed, seen, dropped. No lock is held."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, ArenaSpan, SpanView

# A span of `nbytes`, whole granules, for the stream of a slot; one reference, the caller's.
cdef int span_open(ArenaCore* arena, uint64_t nbytes, uint64_t page_bytes, uint32_t stream_slot,
                   ArenaSpan** out) noexcept nogil
# From here on nothing is committed, and all pages leave. ARENA_IN_USE: a view holds rows.
cdef int span_close(ArenaSpan* span) noexcept nogil
# Ends a reference, on any thread; no wait, no driver call.
cdef void span_drop(ArenaSpan* span) noexcept nogil
# Another stream uses the pages of bytes [first, last), until they have left; of none: all pages, as
# long as the span lives. ARENA_NO_METADATA: nothing changed.
cdef int span_record(ArenaSpan* span, uint32_t stream_slot, uint64_t first,
                     uint64_t last) noexcept nogil

# A view of bytes [first, last), which are not released while it lives; of none if they are equal.
# NULL: out of host memory, or the span is closed.
cdef SpanView* span_view(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil
cdef void span_view_end(void* view) noexcept nogil
# Does a view hold any of these bytes?
cdef bint span_is_held(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil

# What a commit lacked.
cdef struct Lack:
    uint64_t missing        # bytes that it had to make
    uint64_t completions    # the arena's, when it began

# Brings pages [first, spare) into use, and maps those up to `last` ahead if there is room. Makes
# room as an allocation does, but does not wait.
cdef int span_commit(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last,
                     Lack* lack) noexcept nogil
# Waits as an allocation does for work of other streams, if the commit's `status` says that memory
# is out. ARENA_OK: commit again. Otherwise ARENA_INTERRUPTED, or `status`. `until`: 0 at the first
# wait; the time at which all of them end.
cdef int span_wait(ArenaSpan* span, int status, const Lack* lack, uint64_t* until) noexcept nogil

"""The memory of virtual tensors: spans of an arena, charged and counted as its blocks are.

A page that is released may be in use by queued work. So a release is stamped, as the free of a
block is, with the running epoch of the span's stream and of every stream that was noted for one of
its pages, and the pages leave once all of these have ended; nothing waits. Until then a commit
uses them again as they are. The notes of a page end with it.

A span without references is not visible to a user any more; the arena's next call that may block
releases its pages and addresses, once its work is done.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, ArenaSpan, SpanView
from gpumem._support.lease cimport Uses

# Caller holds `grow_lock`. Makes memory for pages [first, last); those up to `spare` come into use.
cdef int span_take(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil
# Pages [first, last) leave, and spare ones wherever they are; those of [spare, spare_end) become or
# stay spare. Releases pages that no work uses. Takes ownership of `room`, which may be NULL.
cdef int span_release(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                      uint32_t spare_end, Uses* room) noexcept nogil
# Returns room that a release needs: `uses` enlarged, or new. NULL, and `uses` is freed: out of host
# memory.
cdef Uses* room_for_streams(ArenaSpan* span, Uses* uses) noexcept nogil

# Caller holds `grow_lock`. Lets spare pages leave, and releases those that have no unfinished work;
# returns the bytes.
cdef uint64_t spans_trim(ArenaCore* arena) noexcept nogil
# Caller holds `grow_lock`. Records events after releases, and releases the pages that no work uses
# any more.
cdef void spans_poll(ArenaCore* arena) noexcept nogil
# The same without events: only what is known to be done, and spans that have ended.
cdef void spans_sweep(ArenaCore* arena) noexcept nogil
# The streams that a release waits for.
cdef enum StampOf:
    OF_NOTHING
    OF_PAGES                    # those that use the pages which leave in it; grow lock
    OF_ALL

# Caller holds `lock`. Stamps the next release: it waits for work that is queued now on its streams.
# `uses` has room for every stream of the span.
cdef void span_stamp(ArenaSpan* span, Uses* uses, StampOf of) noexcept nogil
# Caller holds `lock`. Notes that a stream uses pages [first, last) until they have left; if they
# are none, all pages as long as the span lives. False: out of host memory.
cdef bint span_note(ArenaSpan* span, uint32_t stream_slot, uint32_t first,
                    uint32_t last) noexcept nogil
# Caller holds `grow_lock`. After a sleep or a wake: notes which pages have memory.
cdef void spans_settle(ArenaCore* arena) noexcept nogil
# The arena is not used any more.
cdef void spans_forget(ArenaCore* arena) noexcept nogil

# ---- Spans as virtual tensors have them: made, viewed, dropped. No lock is held ------------------

# A span of `nbytes`, whole granules, for the stream of a slot; one reference, the caller's.
cdef int span_open(ArenaCore* arena, uint64_t nbytes, uint64_t page_bytes, uint32_t stream_slot,
                   ArenaSpan** out) noexcept nogil
# From here on nothing is committed, and all pages leave. ARENA_IN_USE: a view holds rows.
cdef int span_close(ArenaSpan* span) noexcept nogil
# Ends a reference, on any thread; no wait, no driver call.
cdef void span_drop(ArenaSpan* span) noexcept nogil
# Notes that another stream uses the pages of bytes [first, last), until they have left; of none:
# all pages, as long as the span lives. ARENA_NO_METADATA: nothing changed.
cdef int span_record(ArenaSpan* span, uint32_t stream_slot, uint64_t first,
                     uint64_t last) noexcept nogil

# Makes a view of bytes [first, last), which are not released while it lives; of none if equal.
# NULL: out of host memory, or the span is closed.
cdef SpanView* span_view(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil
cdef void span_view_end(void* view) noexcept nogil
# Returns whether a view holds any of these bytes.
cdef bint span_is_held(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil

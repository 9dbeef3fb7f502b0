"""A span: reserved addresses with pages that are made and released in place, and never move.

All pages of a span have one size, the last one excepted, so that a page's number says where it
lies. Caller holds `grow_lock`, everywhere here, and the device's context is current.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.driver cimport Access, CUmemAccessDesc, CUresult, DeviceContext
from gpumem._native.pages.sleep cimport Sleeper
from gpumem._support.atomics cimport load32
from gpumem._support.events cimport EventSource

cdef enum SpanPageState:
    SPAN_EMPTY = 0              # no memory is wanted here
    SPAN_SPARE = 1              # mapped ahead of need
    SPAN_USED = 2               # mapped, and in use
    SPAN_LEAVING = 3            # unmapped once the work before its release has completed

cdef struct SpanPage:
    uint64_t memory             # physical handle; 0: none
    uint64_t release            # number of the release it leaves in; 0: its work is done
    uint32_t state              # SpanPageState
    bint mapped
    bint fresh                  # during one call: mapped, or made, by it

cdef struct Span:
    DeviceContext* context      # of the arena, as the three others
    const Access* access        # the places that may access the pages
    uint64_t* calls             # where calls of the driver are counted
    EventSource* events
    uint64_t base
    uint64_t nbytes             # of all pages; one granule more is reserved, as of a range
    uint64_t page_bytes         # of every page but the last, a power of two
    uint32_t count
    SpanPage* page
    uint64_t held               # bytes that have memory
    uint64_t used               # bytes of the pages in use
    uint32_t leaving            # pages in that state

cdef inline bint span_page_in_use(const SpanPage* page) noexcept nogil:
    # Caller holds the arena lock or `grow_lock`. A change to or from SPAN_USED needs both; other
    # states may change without the arena lock.
    return load32(&page.state) == SPAN_USED

cdef inline uint64_t span_page_at(const Span* span, uint32_t page) noexcept nogil:
    return span.base + page * span.page_bytes

cdef inline uint64_t span_page_bytes(const Span* span, uint32_t page) noexcept nogil:
    return min(span.page_bytes, span.nbytes - page * span.page_bytes)

# Reserves the addresses, without memory. `call` names the refused call; NULL: the host has no
# memory.
cdef CUresult span_reserve(Span* span, uint64_t nbytes, uint64_t page_bytes,
                           const char** call) noexcept nogil
# Returns the bytes of memory that pages [first, last) lack.
cdef uint64_t span_lacks(const Span* span, uint32_t first, uint32_t last) noexcept nogil
# Makes, maps and opens the missing memory of pages [first, last). After a refusal all of that is
# undone; a page that the driver refuses to unmap leaves with the next release.
cdef CUresult span_map(Span* span, uint32_t first, uint32_t last, const char** call) noexcept nogil
# Unmaps and releases the pages that leave and have no unfinished work; pages that the driver
# refuses stay until the next call.
cdef void span_unmap(Span* span) noexcept nogil
# Sets one device's access to every page; stops where the driver refuses.
cdef CUresult span_set_access(const Span* span, const CUmemAccessDesc* place) noexcept nogil
# Names the pages that a sleep releases, or a wake makes: those with memory or in use. False: out
# of host memory.
cdef bint span_list_pages(Span* span, Sleeper* sleeper) noexcept nogil
# Names the bytes of the pages in use. `block` identifies them to the owner.
cdef bint span_list_bytes(const Span* span, Sleeper* sleeper, uint64_t block) noexcept nogil
# Updates which pages have memory, after a sleep or a wake.
cdef void span_settle(Span* span) noexcept nogil
# Whether an address lies in a page of the span that is in use.
cdef bint span_uses(const Span* span, uint64_t address) noexcept nogil
# Frees the addresses of a span without memory. False: the driver refused.
cdef bint span_free(Span* span) noexcept nogil

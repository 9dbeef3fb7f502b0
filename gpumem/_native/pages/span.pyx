"""The driver calls of a span; see span.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._native.driver cimport (
    access_apply, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUmemAccessDesc, CUresult, note_call,
)
from gpumem._native.pages.sleep cimport Sleeper, sleeper_add_page, sleeper_add_piece
from gpumem._native.pages.space cimport address_reserve, page_create
from gpumem._native.pages.types cimport GRANULE
from gpumem._support.atomics cimport store32, sum_add
from gpumem._support.events cimport note_page, REC_RELEASE, REC_RESERVE


cdef CUresult span_reserve(Span* span, uint64_t nbytes, uint64_t page_bytes,
                           const char** call) noexcept nogil:
    cdef CUresult code
    span.nbytes = nbytes
    span.page_bytes = page_bytes
    span.count = <uint32_t>((nbytes + page_bytes - 1) // page_bytes)
    span.page = <SpanPage*>calloc(span.count, sizeof(SpanPage))
    if span.page == NULL:
        call[0] = NULL
        return CUDA_ERROR_OUT_OF_MEMORY
    code = note_call(span.calls, call, "cuMemAddressReserve",
                     address_reserve(span.context, nbytes + GRANULE, &span.base))
    if code != CUDA_SUCCESS:
        free(span.page)
    return code


cdef uint64_t span_lacks(const Span* span, uint32_t first, uint32_t last) noexcept nogil:
    cdef uint64_t missing = 0
    cdef uint32_t i
    for i in range(first, last):
        if span.page[i].memory == 0:
            missing += span_page_bytes(span, i)
    return missing


# ---- pages are made ------------------------------------------------------------------------------

cdef CUresult span_map(Span* span, uint32_t first, uint32_t last, const char** call) noexcept nogil:
    # Memory is made first, because it can run out: then nothing has been mapped.
    cdef CUresult code = make(span, first, last, call)
    cdef uint32_t i = first
    while i < last and code == CUDA_SUCCESS:
        if span.page[i].mapped:
            i += 1
        else:
            code = map_run(span, &i, last, call)
    for i in range(first, last):
        if code != CUDA_SUCCESS and span.page[i].fresh:
            undo(span, i)
        span.page[i].fresh = False
    return code


cdef CUresult make(Span* span, uint32_t first, uint32_t last, const char** call) noexcept nogil:
    cdef SpanPage* page
    cdef CUresult code
    cdef uint32_t i
    for i in range(first, last):
        page = &span.page[i]
        if page.memory:
            continue
        code = note_call(span.calls, call, "cuMemCreate",
                         page_create(span.context, span_page_bytes(span, i), &page.memory))
        if code != CUDA_SUCCESS:
            page.memory = 0         # the driver may have written a value that is not a handle
            return code
        page.fresh = True
        span.held += span_page_bytes(span, i)
        note_page(span.events, REC_RESERVE, span_page_at(span, i), span_page_bytes(span, i), 0)
    return CUDA_SUCCESS


cdef CUresult map_run(Span* span, uint32_t* next_page, uint32_t last,
                      const char** call) noexcept nogil:
    # Access is set for pages side by side in one call.
    cdef uint64_t begin = span_page_at(span, next_page[0])
    cdef uint64_t end = begin
    cdef SpanPage* page
    cdef CUresult code
    while next_page[0] < last and not span.page[next_page[0]].mapped:
        page = &span.page[next_page[0]]
        code = note_call(span.calls, call, "cuMemMap", span.context.table.cuMemMap(
            end, span_page_bytes(span, next_page[0]), 0, page.memory, 0))
        if code != CUDA_SUCCESS:
            return code
        page.mapped = page.fresh = True
        end += span_page_bytes(span, next_page[0])
        next_page[0] += 1
    return note_call(span.calls, call, "cuMemSetAccess",
                     access_apply(span.context, span.access, begin, end - begin))


cdef void undo(Span* span, uint32_t number) noexcept nogil:
    # The page was leaving, or had no memory: it leaves, at once unless the driver refuses.
    cdef SpanPage* page = &span.page[number]
    span.leaving += page.state != SPAN_LEAVING
    store32(&page.state, SPAN_LEAVING)
    page.release = 0
    unmap_run(span, number, number + 1)


# ---- pages are released --------------------------------------------------------------------------

cdef void span_unmap(Span* span) noexcept nogil:
    # Pages side by side are unmapped in one call.
    cdef uint32_t first = 0
    cdef uint32_t last
    while first < span.count:
        last = first
        while (last < span.count and span.page[last].state == SPAN_LEAVING
               and span.page[last].release == 0):
            last += 1
        if last > first:
            unmap_run(span, first, last)
        first = last + 1


cdef void unmap_run(Span* span, uint32_t first, uint32_t last) noexcept nogil:
    cdef uint32_t i, begin
    i = first
    while i < last:
        begin = i
        while i < last and span.page[i].mapped:
            i += 1
        if i > begin and not unmap(span, begin, i):
            return
        i += i == begin
    for i in range(first, last):
        release_page(span, i)


cdef bint unmap(Span* span, uint32_t first, uint32_t last) noexcept nogil:
    # One call for all of them: a refusal leaves all mapped.
    cdef uint32_t i
    cdef uint64_t begin = span_page_at(span, first)
    cdef uint64_t end = span_page_at(span, last - 1) + span_page_bytes(span, last - 1)
    sum_add(span.calls, 1)
    if span.context.table.cuMemUnmap(begin, end - begin) != CUDA_SUCCESS:
        return False
    for i in range(first, last):
        span.page[i].mapped = False
    return True


cdef void release_page(Span* span, uint32_t number) noexcept nogil:
    cdef SpanPage* page = &span.page[number]
    if page.memory:
        sum_add(span.calls, 1)
        if span.context.table.cuMemRelease(page.memory) != CUDA_SUCCESS:
            return
        page.memory = 0
        span.held -= span_page_bytes(span, number)
        note_page(span.events, REC_RELEASE, span_page_at(span, number),
                  span_page_bytes(span, number), 0)
    store32(&page.state, SPAN_EMPTY)
    span.leaving -= 1


cdef bint span_free(Span* span) noexcept nogil:
    sum_add(span.calls, 1)
    if span.context.table.cuMemAddressFree(span.base, span.nbytes + GRANULE) != CUDA_SUCCESS:
        return False
    free(span.page)
    return True


# ---- sleep ---------------------------------------------------------------------------------------

cdef bint span_list_pages(Span* span, Sleeper* sleeper) noexcept nogil:
    cdef uint32_t i
    for i in range(span.count):
        if (span.page[i].mapped or span_page_in_use(&span.page[i])) and not sleeper_add_page(
                sleeper, span_page_at(span, i), span_page_bytes(span, i), &span.page[i].memory):
            return False
    return True


cdef bint span_list_bytes(const Span* span, Sleeper* sleeper, uint64_t block) noexcept nogil:
    cdef uint32_t i
    for i in range(span.count):
        if span_page_in_use(&span.page[i]) and not sleeper_add_piece(
                sleeper, span_page_at(span, i), span_page_bytes(span, i), block):
            return False
    return True


cdef void span_settle(Span* span) noexcept nogil:
    # A page that leaves sleeps, too, and no wake makes it again. If the driver refused to release
    # its memory after an unmap, the page keeps it without a mapping, and was not named.
    cdef SpanPage* page
    cdef uint32_t i
    for i in range(span.count):
        page = &span.page[i]
        if page.mapped and page.memory == 0:
            page.mapped = False
            span.held -= span_page_bytes(span, i)
        elif span_page_in_use(page) and page.memory and not page.mapped:
            page.mapped = True
            span.held += span_page_bytes(span, i)


cdef bint span_uses(const Span* span, uint64_t address) noexcept nogil:
    return (span.base <= address < span.base + span.nbytes
            and span_page_in_use(&span.page[(address - span.base) // span.page_bytes]))


# ---- peers ---------------------------------------------------------------------------------------

cdef CUresult span_set_access(const Span* span, const CUmemAccessDesc* place) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t first = 0
    cdef uint32_t last
    cdef uint64_t begin, end
    while first < span.count and code == CUDA_SUCCESS:
        last = first
        while last < span.count and span.page[last].mapped:
            last += 1
        if last > first:
            begin = span_page_at(span, first)
            end = span_page_at(span, last - 1) + span_page_bytes(span, last - 1)
            sum_add(span.calls, 1)
            code = span.context.table.cuMemSetAccess(begin, end - begin, place, 1)
        first = last + 1
    return code

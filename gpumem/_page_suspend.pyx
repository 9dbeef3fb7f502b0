"""Giving pages up and restoring them; see _page_suspend.pxd."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport NIL
from gpumem._driver cimport CUDA_SUCCESS, CUresult, Place, place_enter, place_leave
from gpumem._page_driver cimport page_allow, page_create, page_map, page_release, page_unmap
from gpumem._page_space cimport orphan_add, view_set
from gpumem._pages cimport address_of, GRANULE_BITS, Page, page_mapped_at, Space
from gpumem._support.lock cimport Lock, lock_acquire, lock_release


cdef CUresult space_give_up(Space* space, Lock* lock, Place* place, uint64_t* calls) noexcept nogil:
    cdef CUresult code = place_enter(place)
    cdef uint32_t i
    if code != CUDA_SUCCESS:
        return code
    for i in range(space.page_count):
        if code == CUDA_SUCCESS and space.page[i].granules and space.page[i].memory:
            code = give_up(space, &space.page[i], lock, place, calls)
    place_leave(place)
    return code


cdef CUresult give_up(Space* space, Page* page, Lock* lock, Place* place,
                      uint64_t* calls) noexcept nogil:
    cdef uint64_t nbytes = <uint64_t>page.granules << GRANULE_BITS
    cdef CUresult code
    if page.dormant != NIL:
        code = page_unmap(place, address_of(space, page.dormant), nbytes)
        calls[0] += 1
        if code != CUDA_SUCCESS:
            return code
        lock_acquire(lock)
        view_set(space, page.dormant, page.granules, NIL)
        page.dormant = NIL
        lock_release(lock)
    code = page_unmap(place, address_of(space, page.active), nbytes)
    calls[0] += 1
    if code == CUDA_SUCCESS:
        let_memory_go(space, page, place, calls)
    return code


cdef void let_memory_go(Space* space, Page* page, Place* place, uint64_t* calls) noexcept nogil:
    calls[0] += 1
    if page_release(place, page.memory) != CUDA_SUCCESS:
        orphan_add(space, page.memory)
    page.memory = 0


cdef CUresult space_restore(Space* space, Place* place, uint64_t* calls,
                            const char** call) noexcept nogil:
    # Page by page, so that a page with memory is a mapped one; access run by run.
    cdef CUresult code = place_enter(place)
    cdef uint32_t g = 0
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    while g < space.granules and code == CUDA_SUCCESS:
        if begins_page(space, g):
            code = restore_run(space, &g, place, calls, call)
        else:
            g += 1
    place_leave(place)
    return code


cdef inline bint begins_page(const Space* space, uint32_t g) noexcept nogil:
    cdef uint32_t mapped = page_mapped_at(space, g)
    return mapped != NIL and space.page[mapped].active == g and space.page[mapped].memory == 0


cdef CUresult restore_run(Space* space, uint32_t* g, Place* place, uint64_t* calls,
                          const char** call) noexcept nogil:
    # The pages without memory from one granule on, as long as they lie side by side.
    cdef uint64_t begin = address_of(space, g[0])
    cdef uint64_t end = begin
    cdef CUresult code = CUDA_SUCCESS
    cdef Page* page
    while code == CUDA_SUCCESS and g[0] < space.granules and begins_page(space, g[0]):
        page = &space.page[page_mapped_at(space, g[0])]
        code = restore_page(space, page, place, calls, call)
        if code == CUDA_SUCCESS:
            end += <uint64_t>page.granules << GRANULE_BITS
            g[0] += page.granules
    if code == CUDA_SUCCESS:
        call[0] = "cuMemSetAccess"
        calls[0] += 1
        code = page_allow(place, begin, end - begin)
    return code


cdef CUresult restore_page(Space* space, Page* page, Place* place, uint64_t* calls,
                           const char** call) noexcept nogil:
    cdef uint64_t nbytes = <uint64_t>page.granules << GRANULE_BITS
    cdef CUresult code = page_create(place, nbytes, &page.memory)
    call[0] = "cuMemCreate"
    calls[0] += 1
    if code != CUDA_SUCCESS:
        page.memory = 0
        return code
    call[0] = "cuMemMap"
    calls[0] += 1
    code = page_map(place, address_of(space, page.active), nbytes, page.memory)
    if code != CUDA_SUCCESS:
        let_memory_go(space, page, place, calls)
    return code

"""Address spaces and their pages: which are idle, taking one out, putting memory in."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport Bfc, Chunk
from gpumem._driver cimport Place
from gpumem._pages cimport Page, Space

cdef void view_set(Space* space, uint32_t first, uint32_t granules, uint32_t page) noexcept nogil
cdef bint may_take(const Space* space, const Chunk* chunk, uint32_t lane) noexcept nogil
# Begins a plan: marks every page inside a free chunk that `lane` may take.
cdef void see_idle_pages(Space* space, uint32_t lane) noexcept nogil
# Makes the active place of an idle page a hole; returns the mark of the chunk it lay in.
cdef void take_out(Space* space, Page* page, uint32_t* lane, uint64_t* epoch) noexcept nogil
# Looks again at what was cut off on either side of a chunk.
cdef void see_beside(Space* space, uint32_t index) noexcept nogil
# Turns granules that are a hole into free memory.
cdef void fill_granules(Space* space, uint32_t first, uint32_t granules, uint32_t lane,
                        uint64_t epoch) noexcept nogil
cdef uint32_t hole_at(const Space* space, uint64_t address) noexcept nogil
# Idle, outside [begin, end), and its dormant view, if any, can be unmapped now.
cdef bint is_movable(const Space* space, const Page* page, uint64_t begin,
                     uint64_t end) noexcept nogil
cdef int space_create(Space* space, Bfc* table, Place* place, uint64_t bytes_wanted,
                      bint large) noexcept nogil
cdef void space_destroy(Space* space, Place* place) noexcept nogil
# Room in the arrays, so that what follows cannot fail.
cdef bint granules_ready(Space* space, uint32_t count) noexcept nogil
cdef bint pages_ready(Space* space, uint32_t count) noexcept nogil
cdef uint32_t page_slot(Space* space) noexcept nogil

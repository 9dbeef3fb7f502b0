"""What must hold of pages and the chunks over them; never on a fast path."""

from gpumem._pages cimport Space

# 0, or the number, from 40 on, of the first invariant that does not hold.
cdef int pages_check(const Space* space) noexcept nogil
cdef const char* pages_invariant(int number) noexcept nogil

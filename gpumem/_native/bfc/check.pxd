"""Every invariant that _native/bfc/table.pxd states, recomputed from the chunks and compared."""

from gpumem._native.bfc.table cimport Bfc

# 0, or the number of the first broken invariant, whose text is bfc_invariant's. `folded`: no cache
# holds a change of requested_in_use that is not in the table.
cdef int bfc_check(const Bfc* table, bint folded) noexcept nogil
cdef const char* bfc_invariant(int number) noexcept nogil

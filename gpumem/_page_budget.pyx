"""A bound on the time that moving takes; see _page_budget.pxd."""

from libc.stdint cimport uint64_t

cdef enum:
    SAVED_NS = 20000000     # 20 ms: what one bad moment may cost


cdef void budget_init(MoveBudget* budget, double share) noexcept nogil:
    budget.share = share
    budget.saved = SAVED_NS if share > 0 else 0
    budget.filled_at = 0


cdef bint budget_allows(MoveBudget* budget, uint64_t now) noexcept nogil:
    if budget.share >= 1:
        return True
    if budget.filled_at and now > budget.filled_at:
        budget.saved += <double>(now - budget.filled_at) * budget.share
    if budget.saved > SAVED_NS:
        budget.saved = SAVED_NS
    budget.filled_at = now
    return budget.saved > 0


cdef void budget_spend(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil:
    budget.saved -= <double>nanoseconds

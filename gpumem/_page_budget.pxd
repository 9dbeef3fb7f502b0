"""How much time moving pages may take: a token bucket in nanoseconds.

It fills with a share of the time that passes, up to 20 ms, and starts full. What moves took at the
driver is taken out afterwards, so one plan may overdraw it; then nothing moves until it has filled.
"""

from libc.stdint cimport uint64_t

cdef struct MoveBudget:
    double share            # of the time that passes; 1 and more: no bound
    double saved            # nanoseconds
    uint64_t filled_at      # reading of the clock; 0: never

cdef void budget_init(MoveBudget* budget, double share) noexcept nogil
cdef bint budget_allows(MoveBudget* budget, uint64_t now) noexcept nogil
cdef void budget_spend(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil

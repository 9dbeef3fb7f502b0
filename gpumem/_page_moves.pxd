"""Carrying a plan out, finishing it, taking it back."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._driver cimport CUresult, Place
from gpumem._pages cimport Demand, Plan, Space

# Without the arena lock. If it fails, plan.refused names the driver's call: undo; else finish. Both
# with the lock, and without a driver call.
cdef CUresult space_execute(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil
cdef void space_finish(Space* space, Plan* plan, const Demand* demand,
                       uint64_t epoch) noexcept nogil
cdef void space_undo(Space* space, Plan* plan, const Demand* demand, uint64_t epoch) noexcept nogil

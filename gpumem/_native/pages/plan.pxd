"""The policy: which pages supply a place, in what order. With both locks of the arena."""

from gpumem._native.pages.types cimport Demand, Plan, PlanResult, Space

# Changes the table and the pages at once: on PLAN_OK they hold the claimed block and the pages' new
# places.
cdef PlanResult space_plan(Space* space, const Demand* demand, Plan* plan) noexcept nogil
# Plans to give every page back that is idle and has no queued work; execute and finish as any.
cdef bint space_plan_trim(Space* space, Plan* plan) noexcept nogil
cdef void plan_free(Plan* plan) noexcept nogil

"""Plans: which pages supply a place, and in which order. Caller holds both locks of the arena."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.pages.types cimport Demand, Plan, PlanResult, Space

# Changes the table and the pages at once: on PLAN_OK they hold the claimed block and the pages' new
# places.
cdef PlanResult space_plan(Space* space, const Demand* demand, Plan* plan) noexcept nogil
# Claims a block below an address, in free chunks and in holes that swaps of idle pages fill. It
# makes no driver call, and the grow lock is not needed. Returns its chunk; NIL: there is no such
# place.
cdef uint32_t space_allocate_lower(Space* space, const Demand* demand,
                                   uint64_t below) noexcept nogil
# Swaps pages until [begin, end) has memory again, as when a block lay there. It makes no driver
# call, and the grow lock is not needed. False: a part has no view of a page, a page is in use
# elsewhere, or the host has no memory.
cdef bint space_restore(Space* space, uint64_t begin, uint64_t end) noexcept nogil
# Plans to release idle pages without queued work: at most `pages`, of at most `nbytes` bytes
# together, the longest idle first. It is executed and finished as any plan.
cdef bint space_plan_trim(Space* space, Plan* plan, uint32_t pages,
                          uint64_t nbytes) noexcept nogil
cdef void plan_free(Plan* plan) noexcept nogil

"""The policy: which pages supply a place, in what order. With both locks of the arena."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.pages.types cimport Demand, Page, Plan, PlanResult, Space

# Changes the table and the pages at once: on PLAN_OK they hold the claimed block and the pages' new
# places.
cdef PlanResult space_plan(Space* space, const Demand* demand, Plan* plan) noexcept nogil
# Plans to give every page back that is idle and has no queued work; execute and finish as any.
cdef bint space_plan_trim(Space* space, Plan* plan) noexcept nogil
cdef void plan_free(Plan* plan) noexcept nogil


# ---- Where a block's place can be built with the fewest new mappings -----------------------------


# The cheapest place found so far.
cdef struct Site:
    uint32_t anchor             # chunk at or below `begin` that swapping pages leaves in place
    uint64_t begin
    uint32_t missing            # granules that need a mapping

# No free chunk holds the block: finds where one can be made. False if nowhere.
cdef bint find_site(Space* space, const Demand* demand, Site* best) noexcept nogil
# The chunk that holds an address, from a chunk below it on.
cdef uint32_t chunk_at(const Space* space, uint32_t anchor, uint64_t address) noexcept nogil
# Is the page idle, and not itself part of the place that is being built?
cdef bint can_swap(const Space* space, const Page* page, uint64_t begin,
                   uint64_t end) noexcept nogil

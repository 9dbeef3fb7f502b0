"""A plan is executed, finished or undone; pages sleep."""

from libc.stdint cimport uint64_t

from gpumem._native.driver cimport CUresult
from gpumem._native.pages.sleep cimport Sleeper
from gpumem._native.pages.types cimport Demand, Plan, Space
from gpumem._support.lock cimport Lock

# Caller does not hold the arena lock. If it fails, plan.refused names the driver's call, and the
# plan is undone; else it is finished. Caller of those below holds the lock; they make no driver
# call.
cdef CUresult space_execute(Space* space, Plan* plan) noexcept nogil
# Before finish or undo: records which pages came, moved and went, also where a call was refused.
cdef void plan_note(const Space* space, const Plan* plan) noexcept nogil
cdef bint space_finish(Space* space, Plan* plan, const Demand* demand,
                       uint64_t epoch) noexcept nogil
cdef void space_undo(Space* space, Plan* plan) noexcept nogil


# ---- Pages that sleep: caller holds `grow_lock`. A page without memory keeps its slot and place --


# Unmaps the views that were left from before a move; stops where the driver refuses. `lock` is held
# while the space changes. A space that keeps its views only notes that they are unmapped.
cdef CUresult space_drop_dormant(Space* space, Lock* lock) noexcept nogil
# Maps those again, once every page has memory; stops where the driver refuses, and names its call.
cdef CUresult space_map_kept(Space* space, const char** call) noexcept nogil
# Names every page. False: out of host memory.
cdef bint space_list_pages(Space* space, Sleeper* sleeper) noexcept nogil

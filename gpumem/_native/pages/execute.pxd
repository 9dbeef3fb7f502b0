"""Carrying a plan out, finishing it, undoing it; giving all pages up and restoring them."""

from libc.stdint cimport uint64_t

from gpumem._native.driver cimport CUresult
from gpumem._native.pages.types cimport Demand, Plan, Space
from gpumem._support.lock cimport Lock

# Without the arena lock. If it fails, plan.refused names the driver's call: undo; else finish. Both
# with the lock, and without a driver call.
cdef CUresult space_execute(Space* space, Plan* plan) noexcept nogil
cdef bint space_finish(Space* space, Plan* plan, const Demand* demand,
                       uint64_t epoch) noexcept nogil
cdef void space_undo(Space* space, Plan* plan, const Demand* demand, uint64_t epoch) noexcept nogil


# ---- Pages without memory: given up while their arena is suspended, restored at the same addresses
#
# Called with the grow lock. A page that was given up has `memory` 0 and keeps its slot and place.


# Unmaps and releases every page that has memory; stops where the driver refuses. `lock` is held
# while the space changes.
cdef CUresult space_release_pages(Space* space, Lock* lock) noexcept nogil
# Makes and maps every page that has none; `call` names what was refused. What was made stays.
cdef CUresult space_restore(Space* space, const char** call) noexcept nogil

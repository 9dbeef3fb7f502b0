"""An arena's budget, where the interpreter is; see _core_budget.pxd."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ARENA_OVER_BUDGET, ArenaCore
from gpumem._bfc cimport round_to_quantum
from gpumem._budget cimport (
    Budget,
    Relief,
    account_of,
    budget_relieve,
    press,
    raise_exceeded,
    tell_errors,
)
from gpumem._budget_core cimport BUDGET_UNLIMITED, BudgetCore, budget_ceiling, budget_charged
from gpumem._buffer cimport MemoryResource
from gpumem._core_memory cimport report_of
from gpumem._support.atomics cimport load64


cdef int join_budget(MemoryResource arena, ArenaCore* core, object budget, object count) except -1:
    cdef bint in_use = False
    cdef BudgetCore* account = account_of(budget, count, arena.name, &in_use)
    arena.budget = budget
    core.tap.budget = budget_charged(account)
    if in_use:
        core.in_use_account = account
        core.detour = True
    else:
        core.held_account = account
    return 0


cdef str count_of(const ArenaCore* core):
    return "reserved" if core.in_use_account == NULL else "in_use"


cdef uint64_t least_limit(object budget, object count) except? 0:
    if isinstance(budget, Budget) and count == "reserved":
        return budget_ceiling((<Budget>budget).core)
    return BUDGET_UNLIMITED


cdef inline BudgetCore* account(const ArenaCore* core) noexcept nogil:
    return core.held_account if core.in_use_account == NULL else core.in_use_account


cdef bint relieve(ArenaCore* core, Relief* relief, list errors) except -1:
    return press(account(core), load64(&core.over_budget), relief, errors)


cdef bint arena_relieve(ArenaCore* core, Relief* relief) noexcept nogil:
    return budget_relieve(account(core), load64(&core.over_budget), relief)


cdef int under_pressure(MemoryResource arena, ArenaCore* core,
                        int (*call)(ArenaCore*, uint64_t) noexcept nogil,
                        uint64_t nbytes) except -1:
    cdef Relief relief = Relief(0, 0, 0, 0, NULL, 0)
    cdef list errors = []
    cdef int status = ARENA_OVER_BUDGET
    while status == ARENA_OVER_BUDGET and relieve(core, &relief, errors):
        with nogil:
            status = call(core, nbytes)
    if status == ARENA_OVER_BUDGET:
        raise_over_budget(arena, core, nbytes, 0, 1, errors)
    tell_errors(errors)
    return status


cdef int raise_over_budget(MemoryResource arena, ArenaCore* core, uint64_t asked, uint64_t extra,
                           uint32_t slot, list errors) except -1:
    rounded = round_to_quantum(asked + extra)
    report = report_of(arena, core, asked, rounded, slot, "budget")
    raise_exceeded(account(core), load64(&core.over_budget), errors, {"report": report})

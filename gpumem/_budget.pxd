"""Budget and Reservation, and what resources need of them.

A resource that is given a budget makes an account of it (`account_of`) and charges that. Where a
charge is refused, it calls `call_pressure_callback` or `budget_call_pressure` without a lock, and
tries again as long as they return True.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.budget cimport BudgetCore
from gpumem._node cimport NodeMember

# The state of one request's calls of callbacks; all zeros at its start.
cdef struct PressureState:
    uint32_t spent          # a bit per depth: levels with a callback that has nothing left to free
    uint32_t called         # the bit of the callback that was called last
    uint32_t calls          # of callbacks
    uint32_t retries        # because there was room at the second check
    BudgetCore* refusing    # before that call: the level that refused, and what it had used
    uint64_t used
    bint others_asked       # the other processes of the node
    bint idle_released      # of the arenas below the level that refused

cdef class Budget:
    cdef BudgetCore* core
    cdef readonly Budget parent
    cdef NodeMember member            # of the node that the tree's root leases from; or None
    cdef object device          # that the node's name begins with, which has the UUID here; or None
    cdef object pressure        # the callback; or None
    cdef set pressing           # threads that are inside it
    cdef object __weakref__

cdef class Reservation:
    cdef readonly Budget budget
    cdef BudgetCore* core       # its budget's; a reference
    cdef uint64_t size
    cdef int step
    cdef uint32_t generation    # of the process that made it

# A new account for a resource, which the caller drops; NULL: no budget. `in_use`: does it count
# blocks in use?
cdef BudgetCore* account_of(object budget, object count, str holder, bint* in_use) except? NULL

# The account of a holder that has a limit of its own, `nbytes`, and charges no budget.
cdef BudgetCore* limit_of(object nbytes, str holder) except NULL

# Charges an account, under pressure if need be, or raises BudgetExceededError with further fields.
cdef int admit_or_raise(BudgetCore* level, uint64_t nbytes, dict numbers) except -1
# A request for `nbytes` bytes was refused. Calls the next callback; True: try again. Its exception
# is appended to `errors`.
cdef bint call_pressure_callback(BudgetCore* level, uint64_t nbytes, PressureState* pressure,
                                 list errors) except -1
# The same for callers without the interpreter lock, which hold no lock of gpumem's. The callbacks'
# exceptions are passed to sys.unraisablehook.
cdef bint budget_call_pressure(BudgetCore* level, uint64_t nbytes,
                               PressureState* pressure) noexcept nogil
# Calls the callbacks of soft limits that were passed; their exceptions are passed to
# sys.unraisablehook.
cdef void call_crossing_callbacks() noexcept
# Raises BudgetExceededError; further fields of the error by name.
cdef int raise_exceeded(BudgetCore* level, uint64_t nbytes, list errors, dict numbers) except -1
# Reports exceptions of callbacks although the request was served in the end.
cdef void report_errors(list errors) noexcept

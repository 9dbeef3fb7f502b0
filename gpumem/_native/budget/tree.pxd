"""Budgets below the interpreter: the tree, its accounts, and the notice of a passed soft limit.

`budget.h` has a level and its arithmetic, which needs no lock. Changes of the tree's shape are
here, under one lock for all trees, which is held for a few words at a time. No function of another
module is called under it. A resource that charges a budget makes an *account* below it: its charges
have a name, and are refunded once, with the account.

In a fork's child every budget is empty: the charges are those of the parent process.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from "budget.h" nogil:
    ctypedef enum BudgetCharge:
        BUDGET_REFUSED
        BUDGET_CHARGED
        BUDGET_CROSSED
    enum:
        BUDGET_DEPTH
    uint64_t BUDGET_UNLIMITED
    ctypedef struct BudgetCore:
        uint64_t used
        uint64_t limit
        uint64_t soft
        uint64_t peak
        BudgetCore* parent
        uint32_t crossed
        uint32_t depth
        uint64_t serial
        uint64_t spare
        uint64_t pending
        int32_t references
        bint is_account
        char* name
        void* node
        void* face
        BudgetCore* child
        BudgetCore* older
        BudgetCore* younger
        BudgetCore* next
        BudgetCore* previous
    uint64_t budget_load(const uint64_t* word)
    uint64_t budget_left(const BudgetCore* level)
    uint64_t budget_room(const BudgetCore* level)
    BudgetCore* budget_refusing(BudgetCore* level, uint64_t nbytes)
    uint64_t budget_add(BudgetCore* level, uint64_t nbytes)
    BudgetCharge budget_charge(BudgetCore* level, uint64_t nbytes)
    void budget_uncharge(BudgetCore* level, uint64_t nbytes)

# The bytes that one child holds of a budget.
cdef struct Holding:
    char* name
    uint64_t used

# A new level with one reference; it holds one on its parent. NULL: out of host memory.
cdef BudgetCore* budget_make(BudgetCore* parent, const char* name, uint64_t limit, uint64_t soft,
                             bint is_account) noexcept nogil
# Puts a level that nothing is charged to below another parent.
cdef void budget_move(BudgetCore* level, BudgetCore* parent) noexcept nogil
# False: out of host memory; the name is as it was.
cdef bint budget_rename(BudgetCore* level, const char* name) noexcept nogil
cdef void budget_retain(BudgetCore* level) noexcept nogil
# Drops a reference. With the last one the remaining charge is refunded to the levels above. NULL:
# there is no level.
cdef void budget_drop(BudgetCore* level) noexcept nogil

# Return the lowest limit of the level and those above it, and the one of them with the least room.
cdef uint64_t budget_ceiling(const BudgetCore* level) noexcept nogil
cdef BudgetCore* budget_tightest(BudgetCore* level) noexcept nogil

# Serial of the level that an account charges; 0: there is no account.
cdef inline uint64_t budget_charged(const BudgetCore* account) noexcept nogil:
    return 0 if account == NULL else account.parent.serial

# Calls `visit` for each level except accounts, the newest first; no level ends during the visit.
cdef void budgets_visit(void (*visit)(const BudgetCore* level, void* context) noexcept nogil,
                        void* context) noexcept nogil

# Returns the bytes that each child holds, the youngest first; of an account with children, those of
# each child. holdings_free frees the array. NULL: out of host memory.
cdef Holding* budget_holdings(const BudgetCore* level, uint32_t* count) noexcept nogil
cdef void holdings_free(Holding* holdings, uint32_t count) noexcept nogil

# Returns a level that has passed its soft limit since the last call, with a reference for the
# caller; NULL: none.
cdef BudgetCore* budget_next_crossed() noexcept nogil
cdef bint budget_has_crossed() noexcept nogil
# Schedules a call of `tell_crossed`, with the interpreter lock, by the main thread at the latest.
cdef void budget_note_crossed() noexcept nogil
cdef void (*tell_crossed)() noexcept

# Releases idle memory of the resources that charge this level, or one below it, without a wait, if
# it may be as much as is missing; returns the bytes. The resource that charges `asking` has
# released its own already. Set by the arenas.
cdef uint64_t (*release_idle_below)(const BudgetCore* level, uint64_t missing,
                                    const BudgetCore* asking) noexcept nogil

# Leases memory from the node, if a level that leases has refused; False: it got none. It asks no
# other process. Set by the module of nodes.
cdef bint (*lease_for)(BudgetCore* level, uint64_t nbytes) noexcept nogil

# Waits a moment for memory that the driver still releases after a process of the node has ended;
# False: none has ended lately. `until`: 0 at the first wait; the time at which all of them end. Set
# by the module of nodes.
cdef bint (*await_refund)(BudgetCore* level, uint64_t* until) noexcept nogil

# Whether a level leases from a node.
cdef inline bint budget_has_node(const BudgetCore* level) noexcept nogil:
    while level.parent != NULL:
        level = level.parent
    return level.node != NULL

# Charges every level or none; False: one refuses. More than 0 bytes.
cdef inline bint budget_admit(BudgetCore* level, uint64_t nbytes) noexcept nogil:
    cdef BudgetCharge charged = budget_charge(level, nbytes)
    while charged == BUDGET_REFUSED and lease_for != NULL and lease_for(level, nbytes):
        charged = budget_charge(level, nbytes)
    if charged == BUDGET_CROSSED:
        budget_note_crossed()
    return charged != BUDGET_REFUSED

"""The tree of budgets, below the interpreter."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport strdup

from gpumem._support.atomics cimport count_add, flag_take, load32, store32
from gpumem._support.lock cimport Lock, lock_acquire, lock_init, lock_release
from gpumem._support.memory cimport lines_alloc
from gpumem._support.process cimport call_soon, on_fork


# The lock of the trees: every link between levels, and the list of all.
cdef Lock trees
cdef BudgetCore* all_levels = NULL
cdef uint64_t levels_made = 0   # so far
cdef uint32_t crossings = 0     # some level may be crossed (atomic)

tell_crossed = NULL
release_idle_below = NULL
lease_for = NULL
await_refund = NULL


# ---- creation and end ----------------------------------------------------------------------------

cdef BudgetCore* budget_make(BudgetCore* parent, const char* name, uint64_t limit, uint64_t soft,
                             bint is_account) noexcept nogil:
    cdef BudgetCore* level = <BudgetCore*>lines_alloc(sizeof(BudgetCore))
    if level == NULL:
        return NULL
    level.name = strdup(name)
    if level.name == NULL:
        free(level)
        return NULL
    level.limit = limit
    level.soft = soft
    # One reference is the caller's. Each child adds one, so that a parent outlives its children.
    level.references = 1
    level.is_account = is_account
    if parent != NULL:
        budget_retain(parent)
        level.parent = parent
        level.depth = parent.depth + 1
    lock_acquire(&trees)
    link(level)
    lock_release(&trees)
    return level


cdef void budget_move(BudgetCore* level, BudgetCore* parent) noexcept nogil:
    cdef BudgetCore* before = level.parent
    budget_retain(parent)
    lock_acquire(&trees)
    unlink(level)
    level.previous = level.younger = level.older = NULL
    level.parent = parent
    level.depth = parent.depth + 1
    link(level)
    lock_release(&trees)
    budget_drop(before)


cdef bint budget_rename(BudgetCore* level, const char* name) noexcept nogil:
    cdef char* copy = strdup(name)
    cdef char* before
    if copy == NULL:
        return False
    lock_acquire(&trees)
    before = level.name
    level.name = copy
    lock_release(&trees)
    free(before)
    return True


cdef void budget_retain(BudgetCore* level) noexcept nogil:
    count_add(&level.references, 1)


cdef void budget_drop(BudgetCore* level) noexcept nogil:
    cdef BudgetCore* parent
    while level != NULL and count_add(&level.references, -1) == 0:
        parent = level.parent
        # The remaining charge counts in every level above as well.
        budget_uncharge(parent, level.used)
        lock_acquire(&trees)
        unlink(level)
        lock_release(&trees)
        free(level.name)
        free(level)
        level = parent


cdef void link(BudgetCore* level) noexcept nogil:
    global all_levels, levels_made
    levels_made += 1
    level.serial = levels_made
    level.next = all_levels
    if all_levels != NULL:
        all_levels.previous = level
    all_levels = level
    if level.parent == NULL:
        return
    level.older = level.parent.child
    if level.older != NULL:
        level.older.younger = level
    level.parent.child = level


cdef void unlink(BudgetCore* level) noexcept nogil:
    global all_levels
    if level.next != NULL:
        level.next.previous = level.previous
    if level.previous != NULL:
        level.previous.next = level.next
    else:
        all_levels = level.next
    if level.older != NULL:
        level.older.younger = level.younger
    if level.younger != NULL:
        level.younger.older = level.older
    elif level.parent != NULL:
        level.parent.child = level.older


# ---- forks: the child's budgets are empty --------------------------------------------------------

cdef void before_fork() noexcept nogil:
    lock_acquire(&trees)


cdef void after_fork_in_parent() noexcept nogil:
    lock_release(&trees)


cdef void after_fork_in_child() noexcept nogil:
    # Another thread may have been between two levels: nothing that was charged is kept.
    cdef BudgetCore* level = all_levels
    lock_init(&trees)
    while level != NULL:
        level.used = 0
        level.pending = 0
        level.peak = 0
        level.crossed = 0
        level = level.next


lock_init(&trees)
on_fork(before_fork, after_fork_in_parent, after_fork_in_child)


# ---- reads ---------------------------------------------------------------------------------------

cdef uint64_t budget_ceiling(const BudgetCore* level) noexcept nogil:
    cdef uint64_t lowest = BUDGET_UNLIMITED
    while level != NULL:
        lowest = min(lowest, budget_load(&level.limit))
        level = level.parent
    return lowest


cdef BudgetCore* budget_tightest(BudgetCore* level) noexcept nogil:
    cdef BudgetCore* tightest = level
    while level != NULL:
        if budget_left(level) < budget_left(tightest):
            tightest = level
        level = level.parent
    return tightest


cdef void budgets_visit(void (*visit)(const BudgetCore* level, void* context) noexcept nogil,
                        void* context) noexcept nogil:
    cdef const BudgetCore* level
    # The lock keeps every level from ending during its visit.
    lock_acquire(&trees)
    level = all_levels
    while level != NULL:
        if not level.is_account:
            visit(level, context)
        level = level.next
    lock_release(&trees)


cdef Holding* budget_holdings(const BudgetCore* level, uint32_t* count) noexcept nogil:
    # Names are copied under the lock: their owners may end right after.
    cdef Holding* holdings
    cdef uint32_t expected
    count[0] = 0
    lock_acquire(&trees)
    expected = list_holdings(level, NULL)
    holdings = <Holding*>calloc(expected + 1, sizeof(Holding))
    if holdings != NULL:
        count[0] = list_holdings(level, holdings)
    lock_release(&trees)
    # Fewer: a name could not be copied.
    if holdings != NULL and count[0] != expected:
        holdings_free(holdings, count[0])
        return NULL
    return holdings


cdef uint32_t list_holdings(const BudgetCore* level, Holding* holdings) noexcept nogil:
    # An arena's account has children: the arena itself, its tags and its graph pools. With NULL in
    # `holdings` it only counts them.
    cdef const BudgetCore* child = level.child
    cdef uint32_t count = 0
    while child != NULL:
        if child.is_account and child.child != NULL:
            count += list_holdings(child, NULL if holdings == NULL else holdings + count)
        else:
            if holdings != NULL:
                holdings[count].name = strdup(child.name)
                holdings[count].used = budget_load(&child.used)
                if holdings[count].name == NULL:
                    return count
            count += 1
        child = child.older
    return count


cdef void holdings_free(Holding* holdings, uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        free(holdings[i].name)
    free(holdings)


# ---- soft limits ---------------------------------------------------------------------------------

cdef BudgetCore* budget_next_crossed() noexcept nogil:
    # The word is cleared before the search: a charge that crosses during it sets it again.
    cdef BudgetCore* level
    if not load32(&crossings):
        return NULL
    lock_acquire(&trees)
    flag_take(&crossings)
    level = all_levels
    # A level without references is passed over: it has no callback any more.
    while level != NULL and not (flag_take(&level.crossed) and revive(level)):
        level = level.next
    if level != NULL:
        store32(&crossings, True)   # there may be others
    lock_release(&trees)
    return level


cdef bint revive(BudgetCore* level) noexcept nogil:
    # Caller holds `trees`. The end of a level acquires it before the level is freed.
    if count_add(&level.references, 1) > 1:
        return True
    count_add(&level.references, -1)
    return False


cdef bint budget_has_crossed() noexcept nogil:
    return load32(&crossings) != 0


cdef void budget_note_crossed() noexcept nogil:
    # Before the call is scheduled, so that it finds the word set.
    store32(&crossings, 1)
    if tell_crossed != NULL:
        call_soon(tell_crossed)

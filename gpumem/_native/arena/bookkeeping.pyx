"""The state changes of an allocation and a free, and what an arena charges its budgets."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport (
    apart_bytes, arena_reserved, arena_reserved_now, arena_state, ArenaCore, Block, family_held,
    IN_SMALL, root_of, SPACES, STATE_ASLEEP, table_of,
)
from gpumem._native.backing cimport Mapped
from gpumem._native.bfc cimport (
    Bfc, bfc_check, bfc_invariant, BFC_OK, bfc_resolve, QUANTUM, round_to_quantum,
)
from gpumem._native.budget cimport (
    budget_admit, budget_load, budget_make, budget_room, budget_uncharge, BUDGET_UNLIMITED,
    BudgetCore,
)
from gpumem._native.pages cimport bytes_of, pages_check, pages_invariant, Space
from gpumem._support.atomics cimport load64, peak_try, store64, sum_add, sum_try


cdef enum:
    OF_CLAIM = 60       # the invariant's number; lower ones are of the tables and of the pages


cdef extern from *:
    """
    #include <stdio.h>
    #include <stdlib.h>
    static inline void gm_panic(const char *invariant) {
        fprintf(stderr, "gpumem: internal error: arena invariant violated: %s\\n",
                invariant);
        abort();
    }
    """
    void gm_panic(const char* invariant) noexcept nogil


cdef void note_reserved(ArenaCore* arena) noexcept nogil:
    cdef uint64_t reserved = arena_reserved(arena) + arena.spanned
    if reserved > arena.stats.max_reserved:
        arena.stats.max_reserved = reserved
    charge_parent(arena)
    note_family(<ArenaCore*>root_of(arena))


cdef void note_family(ArenaCore* root) noexcept nogil:
    cdef uint64_t held = family_held(root)
    cdef uint64_t peak = load64(&root.held_peak)
    while held > peak and not peak_try(&root.held_peak, &peak, held):
        pass


cdef void charge_parent(ArenaCore* arena) noexcept nogil:
    # A child's memory counts in its parent's limit. The difference to what is counted already,
    # modulo 2**64: it is negative where memory has gone back.
    if arena.parent != NULL:
        sum_add(&arena.parent.lent, arena_reserved_now(arena) - arena.charged)
        arena.charged = arena_reserved_now(arena)


cdef void require_sound(const ArenaCore* arena) noexcept nogil:
    # Debug builds only: stop at the operation that broke an invariant, not where it shows later.
    cdef int broken = check_tables(arena, False)
    if broken:
        gm_panic(invariant_text(broken))


cdef int check_tables(const ArenaCore* arena, bint folded) noexcept nogil:
    cdef int broken = bfc_check(&arena.table, folded)
    cdef int i
    if broken == 0:
        broken = bfc_check(&arena.small, folded)
    if broken == 0:
        broken = bfc_check(&arena.persistent, folded)
    for i in range(SPACES):
        if broken == 0 and arena.settings.paged:
            broken = pages_check(&arena.spaces[i])
    return broken


cdef int check_claim(const ArenaCore* arena) noexcept nogil:
    return OF_CLAIM if arena.claimed != arena_held(arena) else 0


cdef const char* invariant_text(int number) noexcept nogil:
    if number == OF_CLAIM:
        return "what is claimed of the limit is what the arena holds"
    return bfc_invariant(number) if number < 40 else pages_invariant(number)


# ---- Keeping to max_mem --------------------------------------------------------------------------

cdef uint64_t arena_room(const ArenaCore* arena) noexcept nogil:
    # In quanta.
    cdef const ArenaCore* root = root_of(arena)
    cdef uint64_t claims = load64(&root.claims)
    cdef uint64_t limit = limit_in_force(arena)
    return (limit - min(limit, claims)) & ~<uint64_t>(QUANTUM - 1)


cdef uint64_t limit_in_force(const ArenaCore* arena) noexcept nogil:
    cdef uint64_t limit = load64(&root_of(arena).settings.max_mem)
    return limit if limit else <uint64_t>1 << 62


cdef bint arena_claim(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef ArenaCore* root = <ArenaCore*>root_of(arena)
    if not sum_try(&root.claims, nbytes, limit_in_force(arena)):
        return nbytes == 0
    arena.claimed += nbytes
    return True


cdef void arena_unclaim(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef ArenaCore* root = <ArenaCore*>root_of(arena)
    sum_add(&root.claims, -nbytes)
    arena.claimed -= nbytes


# ---- Charging an arena's budget ------------------------------------------------------------------


cdef bint arena_join_as(ArenaCore* pool, const ArenaCore* arena) noexcept nogil:
    pool.events.budget = arena.events.budget
    if arena.held_account != NULL:
        pool.held_account = account_beside(arena.held_account)
        return pool.held_account != NULL
    if arena.in_use_account != NULL:
        pool.in_use_account = account_beside(arena.in_use_account)
        pool.detour += 1
        return pool.in_use_account != NULL
    return True


cdef BudgetCore* account_beside(const BudgetCore* account) noexcept nogil:
    return budget_make(account.parent, account.name, BUDGET_UNLIMITED, BUDGET_UNLIMITED, True)


# ---- bytes held ----------------------------------------------------------------------------------

cdef bint arena_charge(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    return (arena.held_account == NULL or nbytes == 0
            or admit(arena, arena.held_account, nbytes, nbytes))


cdef bint admit(ArenaCore* arena, BudgetCore* account, uint64_t nbytes,
                uint64_t wanted) noexcept nogil:
    # `wanted`: the bytes that an error names if the budget refuses.
    return budget_admit(account, nbytes) or refuse_budget(arena, wanted)


cdef bint refuse_budget(ArenaCore* arena, uint64_t wanted) noexcept nogil:
    # Callers that know only the parent of a tag's arena look there.
    store64(&arena.over_budget, wanted)
    if arena.parent != NULL:
        store64(&arena.parent.over_budget, wanted)
    return False


cdef bint arena_claim_region(ArenaCore* arena, uint64_t size, uint64_t* wanted) noexcept nogil:
    # The room may shrink between the look and the claim: tags have the same limit.
    cdef uint64_t room
    while True:
        room = arena_room(arena)
        if size > room:
            return False
        wanted[0] = max(size, min(wanted[0], room) & ~(arena.backing.granule - 1))
        if arena_claim(arena, wanted[0]):
            return True


cdef bint arena_charge_region(ArenaCore* arena, uint64_t size, uint64_t* wanted) noexcept nogil:
    # As above: other arenas charge the same budget.
    cdef uint64_t less
    while not arena_charge(arena, wanted[0]):
        if wanted[0] == size:
            return False
        less = min(budget_room(arena.held_account), wanted[0] - arena.backing.granule)
        wanted[0] = max(size, less & ~(arena.backing.granule - 1))
    return True


cdef void arena_reconcile(ArenaCore* arena) noexcept nogil:
    cdef uint64_t held = arena_held(arena)
    cdef uint64_t charged
    if arena.claimed != held:
        arena_unclaim(arena, arena.claimed - held)      # modulo 2**64: or the claim was too small
    if arena.held_account == NULL:
        return
    # The account's `used` is this arena's alone, and the grow lock keeps it from rising.
    charged = budget_load(&arena.held_account.used)
    if charged > held:
        budget_uncharge(arena.held_account, charged - held)


cdef uint64_t arena_held(const ArenaCore* arena) noexcept nogil:
    # The tables of a sleeping arena say what it will hold again; its handles, what it holds now.
    cdef uint64_t held = apart_bytes(arena) + arena.spanned
    cdef const Mapped* region = arena.backing.mapped
    cdef const Space* space
    cdef uint32_t page
    cdef int i
    if arena_state(arena) != STATE_ASLEEP:
        return arena_reserved(arena) + arena.spanned
    for i in range(SPACES):
        space = &arena.spaces[i]
        for page in range(space.page_count):
            held += bytes_of(&space.page[page]) if space.page[page].memory else 0
    while region != NULL:
        held += region.nbytes if region.memory else 0
        region = region.next
    return held


# ---- bytes in use --------------------------------------------------------------------------------

cdef bint charge_request(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef uint64_t size = round_to_quantum(nbytes)
    return admit(arena, arena.in_use_account, size, size)


cdef bint charge_padding(ArenaCore* arena, uint64_t nbytes, const Block* block) noexcept nogil:
    # A chunk that is larger than the request by less than is worth splitting off comes whole.
    cdef uint64_t size = round_to_quantum(nbytes)
    return block.size <= size or admit(arena, arena.in_use_account, block.size - size, block.size)


cdef bint padding_has_room(ArenaCore* arena, uint64_t size, uint64_t whole) noexcept nogil:
    return (arena.in_use_account == NULL or whole - size <= budget_room(arena.in_use_account)
            or refuse_budget(arena, whole))


cdef uint64_t counted_bytes(ArenaCore* arena, uint64_t handle) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index
    if (arena.in_use_account == NULL
            or bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK):
        return 0
    return table.chunks[index].size


cdef void count_out(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    if nbytes:
        budget_uncharge(arena.in_use_account, nbytes)

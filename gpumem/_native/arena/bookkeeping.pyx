"""The state changes of an allocation and a free, and what an arena charges its budgets."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport (
    apart_bytes, ARENA_OK, ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, arena_reserved, arena_state,
    ArenaCore, Block, family_level, IN_SMALL, SPACES, STATE_ASLEEP, table_of,
)
from gpumem._native.backing cimport Mapped
from gpumem._native.bfc cimport Bfc, bfc_check, bfc_invariant, BFC_OK, bfc_resolve, round_to_quantum
from gpumem._native.budget cimport (
    budget_admit, budget_drop, budget_load, budget_make, budget_refusing, budget_rename,
    budget_room, budget_uncharge, BUDGET_UNLIMITED, BudgetCore,
)
from gpumem._native.pages cimport bytes_of, pages_check, pages_invariant, Space
from gpumem._support.atomics cimport store64


cdef enum:
    OF_LEVEL = 60       # the invariant's number; lower ones are of the tables and of the pages


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


cdef int check_level(const ArenaCore* arena) noexcept nogil:
    return OF_LEVEL if budget_load(&arena.level.used) != arena_held(arena) else 0


cdef const char* invariant_text(int number) noexcept nogil:
    if number == OF_LEVEL:
        return "the bytes charged to the arena's level are those that it holds"
    return bfc_invariant(number) if number < 40 else pages_invariant(number)


# ---- bytes held ----------------------------------------------------------------------------------

cdef bint arena_level_init(ArenaCore* arena) noexcept nogil:
    cdef uint64_t limit = arena.settings.max_mem or BUDGET_UNLIMITED
    cdef BudgetCore* family = budget_make(NULL, b"", limit, BUDGET_UNLIMITED, True)
    if family == NULL:
        return False
    arena.level = budget_make(family, b"", BUDGET_UNLIMITED, BUDGET_UNLIMITED, True)
    budget_drop(family)         # the level has a reference
    return arena.level != NULL


cdef bint arena_join_as(ArenaCore* pool, const ArenaCore* arena) noexcept nogil:
    cdef const BudgetCore* counted = arena.in_use_level
    pool.events.budget = arena.events.budget
    if counted != NULL:
        pool.in_use_level = budget_make(counted.parent, counted.name, BUDGET_UNLIMITED,
                                        BUDGET_UNLIMITED, True)
        pool.detour += 1
        if pool.in_use_level == NULL:
            return False
    return budget_rename(pool.level, arena.level.name)


cdef int arena_charge(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    cdef const BudgetCore* refusing
    while nbytes and not budget_admit(arena.level, nbytes):
        refusing = budget_refusing(arena.level, nbytes)
        # NULL: another thread's charge was in the way and has been rolled back.
        if refusing == family_level(arena):
            return ARENA_OVER_LIMIT
        if refusing != NULL:
            return refuse_budget(arena, nbytes)
    return ARENA_OK


cdef int arena_charge_region(ArenaCore* arena, uint64_t size, uint64_t* wanted) noexcept nogil:
    # Others charge the same levels: the room may shrink before the charge.
    cdef int status = arena_charge(arena, wanted[0])
    cdef uint64_t less
    while status != ARENA_OK and wanted[0] != size:
        less = min(budget_room(arena.level), wanted[0] - arena.backing.granule)
        wanted[0] = max(size, less & ~(arena.backing.granule - 1))
        status = arena_charge(arena, wanted[0])
    return status


cdef int arena_charge_pages(ArenaCore* arena, uint64_t created, uint64_t released) noexcept nogil:
    cdef uint64_t exchanged = min(created, released)
    cdef BudgetCore* budget = family_level(arena).parent
    cdef int status
    if exchanged and budget != NULL and not budget_admit(budget, exchanged):
        return refuse_budget(arena, created)
    status = arena_charge(arena, created - exchanged)
    if status != ARENA_OK:
        arena_refund_pages(arena, created, released)
    return status


cdef void arena_refund_pages(ArenaCore* arena, uint64_t created, uint64_t released) noexcept nogil:
    if created and released:
        budget_uncharge(family_level(arena).parent, min(created, released))


cdef int refuse_budget(ArenaCore* arena, uint64_t wanted) noexcept nogil:
    # Callers that know only the parent of a tag's arena look there.
    store64(&arena.over_budget, wanted)
    if arena.parent != NULL:
        store64(&arena.parent.over_budget, wanted)
    return ARENA_OVER_BUDGET


cdef void arena_reconcile(ArenaCore* arena) noexcept nogil:
    # Only this arena charges its level, and the grow lock keeps `used` from rising.
    cdef uint64_t held = arena_held(arena)
    cdef uint64_t charged = budget_load(&arena.level.used)
    if charged > held:
        budget_uncharge(arena.level, charged - held)


cdef uint64_t arena_held(const ArenaCore* arena) noexcept nogil:
    # The tables of a sleeping arena have the bytes that it will hold again; its handles, those that
    # it holds now.
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
    return admit_in_use(arena, size, size)


cdef bint admit_in_use(ArenaCore* arena, uint64_t nbytes, uint64_t wanted) noexcept nogil:
    # `wanted`: the bytes that an error names if the budget refuses.
    if budget_admit(arena.in_use_level, nbytes):
        return True
    refuse_budget(arena, wanted)
    return False


cdef bint charge_padding(ArenaCore* arena, uint64_t nbytes, const Block* block) noexcept nogil:
    # A chunk is not split where the remainder would be too small.
    cdef uint64_t size = round_to_quantum(nbytes)
    return block.size <= size or admit_in_use(arena, block.size - size, block.size)


cdef bint padding_has_room(ArenaCore* arena, uint64_t size, uint64_t whole) noexcept nogil:
    if arena.in_use_level == NULL or whole - size <= budget_room(arena.in_use_level):
        return True
    refuse_budget(arena, whole)
    return False


cdef uint64_t counted_bytes(ArenaCore* arena, uint64_t handle) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index
    if (arena.in_use_level == NULL
            or bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK):
        return 0
    return table.chunks[index].size


cdef void count_out(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    if nbytes:
        budget_uncharge(arena.in_use_level, nbytes)

"""Handing a block out and taking it back: the books, with the arena lock held."""

from libc.stdint cimport uint32_t

from gpumem._arena_types cimport arena_reserved, ArenaCore, SPACES
from gpumem._bfc cimport bfc_free, SLOT_RELEASED
from gpumem._bfc_check cimport bfc_check, bfc_invariant
from gpumem._page_check cimport pages_check, pages_invariant
from gpumem._support.atomics cimport store32, sum_add

cdef extern from *:
    """
    #include <stdio.h>
    #include <stdlib.h>
    static inline void gm_panic(const char *invariant) {
        fprintf(stderr, "gpumem: an arena's books are broken: it does not hold that %s\\n",
                invariant);
        abort();
    }
    """
    void gm_panic(const char* invariant) noexcept nogil


cdef void note_reserved(ArenaCore* arena) noexcept nogil:
    if arena_reserved(arena) > arena.stats.max_reserved:
        arena.stats.max_reserved = arena_reserved(arena)
    charge_parent(arena)


cdef void charge_parent(ArenaCore* arena) noexcept nogil:
    if arena.parent != NULL:
        sum_add(&arena.parent.lent, arena_reserved(arena) - arena.charged)
        arena.charged = arena_reserved(arena)


cdef void require_sound(const ArenaCore* arena) noexcept nogil:
    # Debug builds only: stop at the operation that broke an invariant, not where it shows later.
    cdef int broken = check_tables(arena, False)
    if broken:
        gm_panic(invariant_text(broken))


cdef void persistent_block_free(ArenaCore* arena, uint32_t index) noexcept nogil:
    # The region goes back at the next call that may block: this may be a finalizer.
    bfc_free(&arena.table, index, SLOT_RELEASED, 0)
    store32(&arena.retired, arena.retired + 1)


cdef int check_tables(const ArenaCore* arena, bint folded) noexcept nogil:
    cdef int broken = bfc_check(&arena.table, folded)
    cdef uint32_t i
    if broken == 0:
        broken = bfc_check(&arena.small, folded)
    if broken == 0:
        broken = bfc_check(&arena.persistent, folded)
    for i in range(SPACES):
        if broken == 0 and arena.settings.paged:
            broken = pages_check(&arena.spaces[i])
    return broken


cdef const char* invariant_text(int number) noexcept nogil:
    return bfc_invariant(number) if number < 40 else pages_invariant(number)

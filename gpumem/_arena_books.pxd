"""The books of an arena: every function with the arena lock held."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore, Block
from gpumem._bfc cimport Bfc

# A chunk was taken: fills in the block and the statistics.
cdef void hand_out(ArenaCore* arena, const Bfc* table, uint32_t index,
                   Block* block) noexcept nogil
# Frees a block on a stream. ARENA_STALE: the handle names no live block.
cdef int take_back(ArenaCore* arena, uint64_t handle, uint32_t stream) noexcept nogil
# Memory came: keeps the highest reserved so far.
cdef void note_reserved(ArenaCore* arena) noexcept nogil
# Memory came or went: a graph pool's counts in its parent's limit.
cdef void charge_parent(ArenaCore* arena) noexcept nogil
# Debug builds: stops the process at the operation that broke an invariant.
cdef void require_sound(const ArenaCore* arena) noexcept nogil
# 0, or the number of the first broken invariant; `folded` as for bfc_check.
cdef int check_tables(const ArenaCore* arena, bint folded) noexcept nogil
cdef const char* invariant_text(int number) noexcept nogil

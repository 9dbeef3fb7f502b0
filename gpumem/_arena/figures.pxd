"""Figures of an arena, copied under its locks."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena.arena cimport Arena
from gpumem._native.arena.api cimport ArenaCore
from gpumem._native.backing cimport Mapped

# The fields of its own `Stats`, without those of its tags.
cdef dict counters_of(Arena arena)
# The first fields of a `BlockInfo` for each of its own blocks, in address order.
cdef list rows_of(Arena arena)
# Blocks that its debug heap knows: address -> (requested bytes, whether it is live).
cdef dict heap_blocks_of(Arena arena)
# Does the address lie in memory apart of this kind, or of any? Such memory does not sleep.
cdef bint find_apart(Arena arena, int kind, uint64_t address, Mapped* memory) noexcept
cdef bint is_apart_as(Arena arena, int kind, uint64_t address) noexcept
cdef bint is_apart(Arena arena, uint64_t address) noexcept
# Figures for the report of a refused request, as the stream of `slot` sees them.
cdef dict refusal_figures(Arena arena, uint32_t slot)
# Bytes of pages that virtual tensors use, in the arena and its tags.
cdef uint64_t virtual_in_use(ArenaCore* arena) noexcept nogil

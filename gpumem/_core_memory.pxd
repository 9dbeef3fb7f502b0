"""Who holds an arena's memory, in one pass over a copy of its books: for errors."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore
from gpumem._buffer cimport MemoryResource

# An OutOfMemoryReport of now. Takes the arena's locks, and calls the driver: hold none.
cdef object report_of(MemoryResource resource, ArenaCore* arena, uint64_t asked, uint64_t rounded,
                      uint32_t slot, str reason)

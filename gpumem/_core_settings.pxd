"""What an arena's settings mean below the interpreter, and what its memory can be backed by."""

from libc.stdint cimport uint64_t

from gpumem._arena_types cimport ArenaSettings
from gpumem._buffer cimport MemoryResource

cdef int settings_from(object config, ArenaSettings* settings) except -1
# Is it backed by pages? Raises ConfigError where they are asked for by name and cannot be had.
cdef bint takes_pages(MemoryResource arena, object config, uint64_t limit) except *
# Why memory cannot be backed by pages that move; empty if it can.
cdef str pages_problem(object memory)

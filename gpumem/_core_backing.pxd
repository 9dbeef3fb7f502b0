"""Which backing serves an arena's memory."""

from gpumem._backing cimport Backing
from gpumem._buffer cimport MemoryResource

cdef int choose_backing(MemoryResource arena, Backing* backing) except -1

"""Which resource serves an allocation that names none."""

from gpumem._buffer cimport MemoryResource

cdef MemoryResource serving(object memory)

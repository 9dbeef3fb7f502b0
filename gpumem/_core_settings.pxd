"""What an arena's settings mean below the interpreter, and what its memory can be backed by."""

from libc.stdint cimport uint64_t

from gpumem._arena_types cimport ArenaSettings
from gpumem._buffer cimport MemoryResource

cdef int settings_from(object config, ArenaSettings* settings) except -1
# Raises ConfigError if the memory cannot be backed as the settings ask.
cdef int require_backing(MemoryResource arena, object config) except -1
# Bytes, a power of two of at least QUANTUM.
cdef uint64_t alignment_of(object alignment) except? 0

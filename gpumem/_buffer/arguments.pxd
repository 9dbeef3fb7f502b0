"""What callers pass for a size and an alignment."""

from libc.stdint cimport uint64_t

# Bytes, 0 or more; a size beyond every address space becomes one that no resource can serve.
cdef uint64_t size_of(object nbytes) except? <uint64_t>-1
# Bytes, a power of two up to 2 MiB.
cdef uint64_t alignment_of(object alignment) except? 0

"""What callers pass for a size and an alignment."""

from libc.stdint cimport uint64_t

# Bytes that `resource` is asked for, 0 or more; None: of a limit. What 63 bits do not hold is
# refused: the resource's OutOfMemoryError, of a limit a ValueError.
cdef uint64_t size_of(object nbytes, object resource) except? <uint64_t>-1
# Bytes, a power of two up to 2 MiB.
cdef uint64_t alignment_of(object alignment) except? 0
# That of a MemoryInfo, for a resource that aligns the blocks; ConfigError beyond 2 MiB.
cdef uint64_t alignment_in(object memory) except? 0

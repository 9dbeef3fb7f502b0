"""What callers pass for a size, an alignment, and a hint for managed memory."""

from libc.stdint cimport uint64_t

# Bytes, 0 or more; a size beyond every address space becomes one that no resource can serve.
cdef uint64_t size_of(object nbytes) except? <uint64_t>-1
# Bytes, a power of two up to 2 MiB.
cdef uint64_t alignment_of(object alignment) except? 0
# The ordinal of the device that a location of managed memory names, or HOST_SIDE. None is the
# memory's own device.
cdef int side_of(object memory, object location) except? -2
# cuMemAdvise's number for a name.
cdef int advice_of(object advice) except -1

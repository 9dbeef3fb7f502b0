"""Handle: the owner of a file descriptor."""

cdef class Handle:
    cdef int fd                     # -1: closed or detached
    cdef readonly object kind       # a MemoryHandleType or SemaphoreType; None: unknown
    cdef readonly object contents   # describes what it refers to, for its receiver; None: nothing
    cdef object __weakref__

# The number of an argument; TypeError or ValueError: it cannot be a descriptor's.
cdef int descriptor_of(object fd) except -1
# A new owner of a descriptor that was just made; a failure closes it.
cdef Handle handle_of(int fd, object kind, object contents)

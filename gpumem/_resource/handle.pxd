"""Handle: the owner of a file descriptor."""

cdef class Handle:
    cdef int fd                     # -1: closed or detached
    cdef readonly object kind       # a MemoryHandleType or SemaphoreType; None: not said
    cdef readonly object contents   # what is behind it, for whoever receives it; None: not said
    cdef object __weakref__

# A new owner of a descriptor that was just made.
cdef Handle handle_of(int fd, object kind, object contents)

"""Memory of the host: its refusal, cache lines, reserved addresses, mapped pages."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport realloc

# Raises MemoryError unless host memory was there for an act such as "copying a list of blocks".
cdef inline int require_memory(bint available, str act) except -1:
    if not available:
        raise MemoryError(f"out of host memory while {act}")
    return 0

cdef extern from "lines.h" nogil:
    void* lines_alloc(size_t nbytes)
    # A member before the first of those that other threads write more often, or less, than the ones
    # above it.
    ctypedef struct LineStart:
        pass

# Addresses that are reserved once and committed from the front; see include/reserved.h.
cdef extern from "reserved.h" nogil:
    uint64_t addresses_bound(uint64_t wanted)
    void* reserved_open(size_t nbytes)
    int reserved_commit(void* base, size_t nbytes)
    void reserved_close(void* base, size_t nbytes)

# Doubles an array that never moves: reserves `most` items at first, commits `capacity` of them.
# False: `most` is reached, or the host has no memory; nothing has changed.
cdef inline bint reserved_grow(void** array, uint32_t* capacity, uint32_t most,
                               size_t item) noexcept nogil:
    cdef uint32_t larger = capacity[0] * 2 if capacity[0] else 64
    if larger > most:
        return False
    if array[0] == NULL:
        array[0] = reserved_open(most * item)
    if array[0] == NULL or reserved_commit(array[0], larger * item) != 0:
        return False
    capacity[0] = larger
    return True

# Gives an array room for `count` items, by doubling from `first` on. False: the host has no memory,
# and nothing has changed.
cdef inline bint array_reserve(void** array, uint32_t* capacity, uint64_t count, uint32_t first,
                               size_t item) noexcept nogil:
    cdef uint32_t larger = capacity[0] if capacity[0] else first
    cdef void* grown
    if count <= capacity[0]:
        return True
    while larger < count:
        larger *= 2
    grown = realloc(array[0], larger * item)
    if grown == NULL:
        return False
    array[0] = grown
    capacity[0] = larger
    return True

cdef extern from "<sys/mman.h>" nogil:
    void* mmap(void* address, size_t nbytes, int protection, int flags, int fd, long offset)
    int munmap(void* address, size_t nbytes)
    int madvise(void* address, size_t nbytes, int advice)
    void* MAP_FAILED
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_SHARED
        MAP_ANONYMOUS

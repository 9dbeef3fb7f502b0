"""Memory of the host that is not malloc's: cache lines, reserved addresses, mapped pages."""

cdef extern from "lines.h" nogil:
    void* lines_alloc(size_t nbytes)

# Addresses that are reserved once and committed from the front; see include/reserved.h.
cdef extern from "reserved.h" nogil:
    void* reserved_open(size_t nbytes)
    int reserved_commit(void* base, size_t nbytes)
    void reserved_close(void* base, size_t nbytes)

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

"""C level: files that hold a timeline's page."""

from gpumem.interop.timelines._core cimport TimelinePage

# -1: errno says why. The descriptor is the caller's.
cdef int page_file_new() noexcept nogil
# A descriptor of our own for the same file, closed when another program is run; -1: errno.
cdef int page_file_dup(int fd) noexcept nogil
# NULL: errno says why.
cdef TimelinePage* page_file_map(int fd) noexcept nogil
cdef void page_file_unmap(TimelinePage* page) noexcept nogil
# At least a page long, and nobody can make it shorter under those who have it mapped.
cdef bint page_file_is_long(int fd) noexcept nogil
cdef bint page_file_is_sealed(int fd) noexcept nogil
cdef void page_file_close(int fd) noexcept nogil

"""Files that hold a timeline's page; see _page_file.pxd."""

from libc cimport errno as c_errno

from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from gpumem.interop._timeline_core cimport TIMELINE_PAGE_BYTES, TimelinePage

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MFD_CLOEXEC
        MFD_ALLOW_SEALING
    int memfd_create(const char* name, unsigned int flags)

cdef extern from "<fcntl.h>" nogil:
    enum:
        F_DUPFD_CLOEXEC
        F_ADD_SEALS
        F_GET_SEALS
        F_SEAL_GROW
        F_SEAL_SEAL
        F_SEAL_SHRINK
    int fcntl(int fd, int command, ...)

cdef extern from "<sys/stat.h>" nogil:
    struct stat_t "stat":
        long st_size
    int fstat(int fd, stat_t* status)

cdef extern from "<unistd.h>" nogil:
    int ftruncate(int fd, long size)
    int c_close "close"(int fd)


cdef int page_file_new() noexcept nogil:
    cdef int fd = memfd_create(b"gpumem timeline", MFD_CLOEXEC | MFD_ALLOW_SEALING)
    cdef int error
    if fd < 0:
        return -1
    if (ftruncate(fd, TIMELINE_PAGE_BYTES) == 0
            and fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0):
        return fd
    error = c_errno.errno
    c_close(fd)
    c_errno.errno = error
    return -1


cdef int page_file_dup(int fd) noexcept nogil:
    return fcntl(fd, F_DUPFD_CLOEXEC, 3)


cdef TimelinePage* page_file_map(int fd) noexcept nogil:
    cdef void* page = mmap(NULL, TIMELINE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    return NULL if page == MAP_FAILED else <TimelinePage*>page


cdef void page_file_unmap(TimelinePage* page) noexcept nogil:
    munmap(page, TIMELINE_PAGE_BYTES)


cdef bint page_file_is_long(int fd) noexcept nogil:
    cdef stat_t status
    return fstat(fd, &status) == 0 and status.st_size >= TIMELINE_PAGE_BYTES


cdef bint page_file_is_sealed(int fd) noexcept nogil:
    cdef int seals = fcntl(fd, F_GET_SEALS)
    return seals >= 0 and seals & F_SEAL_SHRINK != 0


cdef void page_file_close(int fd) noexcept nogil:
    c_close(fd)

"""Files in memory, mapped and pinned; see _backing_file.pxd.

The kernel hands out cleared pages. The size of a file is sealed, so that nobody who is given its
descriptor can make a page vanish under the others.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free

from gpumem._backing cimport (
    Backing,
    Mapped,
    backing_init,
    backing_note,
    mapped_add,
    mapped_take,
)
from gpumem._driver cimport (
    CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE,
    CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUresult,
    Place,
    place_enter,
    place_leave,
)

cdef extern from *:
    """
    #include <fcntl.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <unistd.h>

    /* A file of that many bytes, and where it is mapped; -1: no memory, or no descriptor. */
    static int gm_file_map(uint64_t nbytes, void **address) {
        int fd = memfd_create("gpumem", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd < 0) return -1;
        *address = MAP_FAILED;
        if (ftruncate(fd, (off_t)nbytes) == 0
                && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
            *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (*address != MAP_FAILED) return fd;
        close(fd);
        return -1;
    }
    static void gm_file_end(int fd, void *address, uint64_t nbytes) {
        munmap(address, nbytes);
        close(fd);
    }
    """
    int gm_file_map(uint64_t nbytes, void** address) noexcept nogil
    void gm_file_end(int fd, void* address, uint64_t nbytes) noexcept nogil

cdef enum:
    PAGE = 4096


cdef void file_init(Backing* backing, Place* place) noexcept nogil:
    backing_init(backing, place)
    backing.reserve = file_reserve
    backing.release = file_release
    backing.call = "cuMemHostRegister"
    backing.granule = PAGE
    backing.has_files = True


cdef CUresult file_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef void* pages = NULL
    cdef int fd = gm_file_map(size, &pages)
    cdef CUresult code
    if fd < 0:
        self.call = "memfd_create"
        return CUDA_ERROR_OUT_OF_MEMORY
    code = place_enter(self.place)
    if code == CUDA_SUCCESS:
        code = pin(self, pages, size)
        if code == CUDA_SUCCESS and mapped_add(self, <uintptr_t>pages, size, fd) == NULL:
            self.place.table.cuMemHostUnregister(pages)
            code = CUDA_ERROR_OUT_OF_MEMORY
        place_leave(self.place)
    if code != CUDA_SUCCESS:
        gm_file_end(fd, pages, size)
    address[0] = <uintptr_t>pages
    return code


cdef CUresult pin(Backing* self, void* pages, uint64_t size) noexcept nogil:
    cdef CUdeviceptr seen = 0
    cdef CUresult code = backing_note(self, "cuMemHostRegister", self.place.table.cuMemHostRegister(
        pages, size, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemHostGetDevicePointer",
                        self.place.table.cuMemHostGetDevicePointer(&seen, pages, 0))
    if code == CUDA_SUCCESS and seen != <uintptr_t>pages:
        code = CUDA_ERROR_NOT_SUPPORTED     # a block has one address
    if code != CUDA_SUCCESS:
        self.place.table.cuMemHostUnregister(pages)
    return code


cdef CUresult file_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # Pages that the device may still use are not unmapped.
    cdef Mapped* mapped
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuCtxSynchronize", self.place.table.cuCtxSynchronize())
    if code == CUDA_SUCCESS:
        code = backing_note(self, "cuMemHostUnregister",
                            self.place.table.cuMemHostUnregister(<void*><uintptr_t>address))
    place_leave(self.place)
    if code != CUDA_SUCCESS:
        return code
    mapped = mapped_take(self, address)
    if mapped != NULL:
        gm_file_end(<int>mapped.memory, <void*><uintptr_t>address, mapped.nbytes)
        free(mapped)
    return code

"""Regions of one physical handle each, mapped once, and of one file in memory each.

A node's memory is pinned, and the CPU has access too.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

from gpumem._native.backing.device cimport (
    Backing, backing_init, backing_note, backing_release, backing_reserve, Mapped, mapped_add,
    mapped_find, mapped_remove,
)
from gpumem._native.backing.pinned cimport pages_pin
from gpumem._native.driver cimport (
    Access, access_apply, access_init, context_enter, context_leave, CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEM_LOCATION_TYPE_HOST_NUMA, CU_STREAM_NON_BLOCKING, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUdeviceptr, CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult,
    CUstream, DeviceContext,
)


cdef enum:
    GRANULE = 2097152           # 2 MiB, the driver's for every location


cdef void numa_init(Backing* backing, DeviceContext* context, int node) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = physical_reserve
    backing.release = physical_release
    backing.waits = False
    backing.call = "cuMemCreate"
    backing.granule = GRANULE
    backing.node = node
    backing.has_handles = True


cdef void shared_init(Backing* backing, DeviceContext* context, int node) noexcept nogil:
    numa_init(backing, context, node)
    backing.reserve = shared_reserve
    backing.exportable = True


cdef CUresult numa_try(DeviceContext* context, int node, const char** call) noexcept nogil:
    cdef Backing backing
    cdef Access access
    cdef uint64_t address = 0
    cdef CUresult code
    numa_init(&backing, context, node)
    access_init(&access, context, node)
    backing.access = &access
    code = backing_reserve(&backing, GRANULE, &address)
    if code == CUDA_SUCCESS:
        code = backing_release(&backing, address, GRANULE)
        if code != CUDA_SUCCESS:
            backing_release(&backing, address, GRANULE)     # once more what the driver refused
    call[0] = backing.call
    return code


cdef CUresult create(const Backing* self, uint64_t nbytes,
                     CUmemGenericAllocationHandle* memory) noexcept nogil:
    cdef CUmemAllocationProp prop
    memset(&prop, 0, sizeof(prop))
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA
    prop.location.id = self.node
    # Memory that is exported may also be the device's own.
    if self.node == THE_DEVICE:
        prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.context.device
    if self.exportable:
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return self.context.table.cuMemCreate(memory, nbytes, &prop, 0)


# ---- a region: addresses, memory, mapping, access ------------------------------------------------

cdef CUresult physical_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef uint64_t nbytes = (size + GRANULE - 1) & ~<uint64_t>(GRANULE - 1)
    cdef CUdeviceptr base = 0
    cdef CUresult code = backing_note(
        self, "cuMemAddressReserve", self.context.table.cuMemAddressReserve(
            &base, nbytes, 0, 0, 0))
    if code == CUDA_SUCCESS:
        code = fill(self, base, nbytes)
        if code != CUDA_SUCCESS:
            self.context.table.cuMemAddressFree(base, nbytes)
    address[0] = base
    return code


cdef CUresult fill(Backing* self, uint64_t base, uint64_t nbytes) noexcept nogil:
    # Memory under reserved addresses. After a refusal each step is taken back, the last one first.
    cdef CUmemGenericAllocationHandle memory = 0
    cdef CUresult code = backing_note(self, "cuMemCreate", create(self, nbytes, &memory))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemMap", self.context.table.cuMemMap(base, nbytes, 0, memory, 0))
    if code == CUDA_SUCCESS:
        code = open_access(self, base, nbytes)
        if code == CUDA_SUCCESS and mapped_add(self, base, nbytes, memory) == NULL:
            code = CUDA_ERROR_OUT_OF_MEMORY
        if code != CUDA_SUCCESS:
            self.context.table.cuMemUnmap(base, nbytes)
    if code != CUDA_SUCCESS:
        self.context.table.cuMemRelease(memory)
    return code


cdef CUresult open_access(Backing* self, uint64_t base, uint64_t nbytes) noexcept nogil:
    return backing_note(self, "cuMemSetAccess",
                        access_apply(self.context, self.access, base, nbytes))


cdef CUresult physical_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # After a refusal the region is whole and its record stays, to be tried again: a mapping keeps
    # memory whose handle was released. Once unmapped the addresses are not used again.
    cdef Mapped* mapped = mapped_find(self, address)
    cdef CUresult code
    if mapped == NULL:
        return CUDA_SUCCESS
    if mapped.memory != 0:
        code = backing_note(self, "cuMemRelease", self.context.table.cuMemRelease(mapped.memory))
        if code != CUDA_SUCCESS:
            return code
        mapped.memory = 0
    if not mapped.asleep:
        code = backing_note(self, "cuMemUnmap",
                            self.context.table.cuMemUnmap(address, mapped.nbytes))
        if code != CUDA_SUCCESS:
            return code
    mapped_remove(self, address)
    self.context.table.cuMemAddressFree(address, mapped.nbytes)
    free(mapped)
    return CUDA_SUCCESS


# ---- memory to be shared -------------------------------------------------------------------------

cdef CUresult shared_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUresult code = physical_reserve(self, size, address)
    if code != CUDA_SUCCESS:
        return code
    code = clear(self, address[0], size)
    if code != CUDA_SUCCESS:
        physical_release(self, address[0], size)
    return code


cdef CUresult clear(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # On a stream of its own, so that it waits for no other work.
    cdef CUstream stream = NULL
    cdef CUresult code = backing_note(self, "cuStreamCreate", self.context.table.cuStreamCreate(
        &stream, CU_STREAM_NON_BLOCKING))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemsetD8Async", self.context.table.cuMemsetD8Async(
        address, 0, size, stream))
    if code == CUDA_SUCCESS:
        code = backing_note(self, "cuStreamSynchronize",
                            self.context.table.cuStreamSynchronize(stream))
        if code != CUDA_SUCCESS:
            self.context.table.cuCtxSynchronize()   # the caller unmaps what is being cleared
    self.context.table.cuStreamDestroy(stream)
    return code


cdef CUresult shared_export(Backing* self, uint64_t memory, int* fd) noexcept nogil:
    cdef CUresult code = context_enter(self.context)
    if code == CUDA_SUCCESS:
        code = self.context.table.cuMemExportToShareableHandle(
            fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        context_leave(self.context)
    return code


# ---- Files in memory, mapped and pinned ----------------------------------------------------------
#
# The kernel hands out cleared pages. The size of a file is sealed, so that no process that gets its
# descriptor can take a page away from the others.


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


cdef void file_init(Backing* backing, DeviceContext* context) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = file_reserve
    backing.release = file_release
    backing.call = "cuMemHostRegister"
    backing.granule = PAGE
    backing.has_files = True
    backing.waits = True


cdef CUresult file_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef void* pages = NULL
    cdef int fd = gm_file_map(size, &pages)
    cdef CUresult code
    if fd < 0:
        self.call = "memfd_create"
        return CUDA_ERROR_OUT_OF_MEMORY
    code = pages_pin(self, <uintptr_t>pages, size, fd)
    if code != CUDA_SUCCESS:
        gm_file_end(fd, pages, size)
    address[0] = <uintptr_t>pages
    return code


cdef CUresult file_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # Pages that the driver still has are not unmapped.
    cdef Mapped* mapped
    cdef CUresult code = backing_note(
        self, "cuMemHostUnregister",
        self.context.table.cuMemHostUnregister(<void*><uintptr_t>address))
    if code != CUDA_SUCCESS:
        return code
    # The descriptor goes with the mapping; other processes keep theirs.
    mapped = mapped_remove(self, address)
    if mapped != NULL:
        gm_file_end(<int>mapped.memory, <void*><uintptr_t>address, mapped.nbytes)
        free(mapped)
    return code

"""Host memory of one NUMA node; see _backing_numa.pxd.

A region is one physical handle, mapped once under addresses of its own. Both the device and
the CPU get access. Such memory is pinned; its granule is the driver's, 2 MiB.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from gpumem._backing cimport (
    Backing,
    Mapped,
    backing_init,
    backing_note,
    mapped_add,
    mapped_take,
)
from gpumem._driver cimport (
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEM_LOCATION_TYPE_HOST_NUMA,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUmemAccessDesc,
    CUmemAllocationProp,
    CUmemGenericAllocationHandle,
    CUresult,
    Place,
    place_enter,
    place_leave,
)

cdef enum:
    GRANULE = 2097152           # 2 MiB, the driver's for every location


cdef void numa_init(Backing* backing, Place* place, int node) noexcept nogil:
    backing_init(backing, place)
    backing.reserve = numa_reserve
    backing.release = numa_release
    backing.call = "cuMemCreate"
    backing.granule = GRANULE
    backing.node = node


cdef CUresult numa_try(Place* place, int node, const char** call) noexcept nogil:
    cdef Backing backing
    cdef uint64_t address = 0
    cdef CUresult code
    numa_init(&backing, place, node)
    code = numa_reserve(&backing, GRANULE, &address)
    if code == CUDA_SUCCESS:
        code = numa_release(&backing, address, GRANULE)
    call[0] = backing.call
    return code


cdef CUresult create(Place* place, int node, uint64_t nbytes,
                     CUmemGenericAllocationHandle* memory) noexcept nogil:
    cdef CUmemAllocationProp prop
    memset(&prop, 0, sizeof(prop))
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA
    prop.location.id = node
    return place.table.cuMemCreate(memory, nbytes, &prop, 0)


# ---- a region: addresses, memory, mapping, access ------------------------------------------------

cdef CUresult numa_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef uint64_t nbytes = (size + GRANULE - 1) & ~<uint64_t>(GRANULE - 1)
    cdef CUdeviceptr base = 0
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemAddressReserve", self.place.table.cuMemAddressReserve(
        &base, nbytes, 0, 0, 0))
    if code == CUDA_SUCCESS:
        code = fill(self, base, nbytes)
        if code != CUDA_SUCCESS:
            self.place.table.cuMemAddressFree(base, nbytes)
    place_leave(self.place)
    address[0] = base
    return code


cdef CUresult fill(Backing* self, uint64_t base, uint64_t nbytes) noexcept nogil:
    # Memory under reserved addresses.
    cdef CUmemGenericAllocationHandle memory = 0
    cdef CUresult code = backing_note(self, "cuMemCreate", create(
        self.place, self.node, nbytes, &memory))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemMap", self.place.table.cuMemMap(base, nbytes, 0, memory, 0))
    if code == CUDA_SUCCESS:
        code = open_access(self, base, nbytes)
        if code == CUDA_SUCCESS and mapped_add(self, base, nbytes, memory) == NULL:
            code = CUDA_ERROR_OUT_OF_MEMORY
        if code != CUDA_SUCCESS:
            self.place.table.cuMemUnmap(base, nbytes)
    if code != CUDA_SUCCESS:
        self.place.table.cuMemRelease(memory)
    return code


cdef CUresult open_access(Backing* self, uint64_t base, uint64_t nbytes) noexcept nogil:
    cdef CUmemAccessDesc[2] access
    access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE
    access[0].location.id = self.place.ordinal
    access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    access[1].location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA
    access[1].location.id = self.node
    access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return backing_note(self, "cuMemSetAccess",
                        self.place.table.cuMemSetAccess(base, nbytes, access, 2))


cdef CUresult numa_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # Unmapping does not wait for the device, so it is waited for here.
    cdef Mapped* mapped
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuCtxSynchronize", self.place.table.cuCtxSynchronize())
    if code == CUDA_SUCCESS:
        mapped = mapped_take(self, address)
        if mapped != NULL:
            code = empty(self, mapped)
            free(mapped)
    place_leave(self.place)
    return code


cdef CUresult empty(Backing* self, const Mapped* mapped) noexcept nogil:
    # Addresses whose memory would not be unmapped stay taken.
    cdef CUresult code = backing_note(self, "cuMemUnmap", self.place.table.cuMemUnmap(
        mapped.address, mapped.nbytes))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemRelease", self.place.table.cuMemRelease(mapped.memory))
    self.place.table.cuMemAddressFree(mapped.address, mapped.nbytes)
    return code

"""Managed memory; see _backing_managed.pxd.

The driver's functions for hints took a device until CUDA 12.1 and take a location since 12.2.
_cuda fills the one entry or the other by the driver's version, so here the one that is there
is called.
"""

from libc.stdint cimport uint64_t

from gpumem._backing cimport (
    Backing,
    backing_init,
    backing_note,
    Side,
    SIDE_DEVICE,
    SIDE_NONE,
)
from gpumem._driver cimport (
    CU_MEM_ADVISE_SET_ACCESSED_BY,
    CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    CU_MEM_ADVISE_SET_READ_MOSTLY,
    CU_MEM_ATTACH_GLOBAL,
    CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEM_LOCATION_TYPE_HOST,
    CUDA_ERROR_NOT_SUPPORTED,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUmem_advise,
    CUmemLocation,
    CUresult,
    CUstream,
    Place,
    place_enter,
    place_leave,
)


cdef void managed_init(Backing* backing, Place* place) noexcept nogil:
    backing_init(backing, place)
    backing.reserve = managed_reserve
    backing.call = "cuMemAllocManaged"


cdef CUresult managed_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemAllocManaged", self.place.table.cuMemAllocManaged(
        &pointer, size, CU_MEM_ATTACH_GLOBAL))
    if code == CUDA_SUCCESS:
        code = give_hints(self, pointer, size)
        if code != CUDA_SUCCESS:
            self.place.table.cuMemFree(pointer)
    place_leave(self.place)
    address[0] = pointer
    return code


cdef CUresult give_hints(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # Of a new region. Advice first: where pages live by preference decides what a prefetch does.
    cdef CUresult code = CUDA_SUCCESS
    if self.hints.read_mostly:
        code = advise(self, address, size, CU_MEM_ADVISE_SET_READ_MOSTLY, SIDE_DEVICE)
    if code == CUDA_SUCCESS and self.hints.preferred_location != SIDE_NONE:
        code = advise(self, address, size, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                      self.hints.preferred_location)
    if code == CUDA_SUCCESS and self.hints.accessed_by != SIDE_NONE:
        code = advise(self, address, size, CU_MEM_ADVISE_SET_ACCESSED_BY, self.hints.accessed_by)
    if code == CUDA_SUCCESS and self.hints.prefetch != SIDE_NONE:
        code = backing_note(self, "cuMemPrefetchAsync", managed_prefetch(
            self.place, address, size, ordinal(self, self.hints.prefetch), NULL))
    return code


cdef CUresult advise(Backing* self, uint64_t address, uint64_t size, CUmem_advise advice,
                     Side side) noexcept nogil:
    return backing_note(self, "cuMemAdvise", managed_advise(
        self.place, address, size, advice, ordinal(self, side)))


cdef int ordinal(const Backing* self, Side side) noexcept nogil:
    return self.place.ordinal if side == SIDE_DEVICE else HOST_SIDE


cdef CUmemLocation location_of(int where) noexcept nogil:
    cdef CUmemLocation location
    location.type = CU_MEM_LOCATION_TYPE_HOST if where == HOST_SIDE else CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0 if where == HOST_SIDE else where
    return location


cdef CUresult managed_advise(Place* place, uint64_t address, uint64_t nbytes, CUmem_advise advice,
                             int where) noexcept nogil:
    # Before 12.2 the CPU is device -1, as HOST_SIDE is.
    if place.table.cuMemAdvise != NULL:
        return place.table.cuMemAdvise(address, nbytes, advice, location_of(where))
    if place.table.cuMemAdvise_v1 != NULL:
        return place.table.cuMemAdvise_v1(address, nbytes, advice, where)
    return CUDA_ERROR_NOT_SUPPORTED


cdef CUresult managed_prefetch(Place* place, uint64_t address, uint64_t nbytes, int where,
                               CUstream stream) noexcept nogil:
    if place.table.cuMemPrefetchAsync != NULL:
        return place.table.cuMemPrefetchAsync(address, nbytes, location_of(where), 0, stream)
    if place.table.cuMemPrefetchAsync_v1 != NULL:
        return place.table.cuMemPrefetchAsync_v1(address, nbytes, where, stream)
    return CUDA_ERROR_NOT_SUPPORTED

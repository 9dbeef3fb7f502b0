"""Virtual memory of the driver: reserve, create, map, unmap, release."""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from gpumem._driver cimport (
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_LOCATION_TYPE_DEVICE,
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
    ADDRESS_ALIGNMENT = 33554432        # 32 MiB, the largest page


cdef CUresult address_reserve(Place* place, uint64_t nbytes, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    code = place.table.cuMemAddressReserve(&pointer, nbytes, ADDRESS_ALIGNMENT, 0, 0)
    place_leave(place)
    address[0] = pointer
    return code


cdef CUresult address_free(Place* place, uint64_t address, uint64_t nbytes) noexcept nogil:
    return place.table.cuMemAddressFree(address, nbytes)


cdef CUresult page_create(Place* place, uint64_t nbytes, uint64_t* memory) noexcept nogil:
    cdef CUmemAllocationProp prop
    cdef CUmemGenericAllocationHandle handle = 0
    memset(&prop, 0, sizeof(prop))
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = place.device
    cdef CUresult code = place.table.cuMemCreate(&handle, nbytes, &prop, 0)
    memory[0] = handle
    return code


cdef CUresult page_map(Place* place, uint64_t address, uint64_t nbytes,
                       uint64_t memory) noexcept nogil:
    return place.table.cuMemMap(address, nbytes, 0, memory, 0)


cdef CUresult page_allow(Place* place, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef CUmemAccessDesc access
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = place.device
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return place.table.cuMemSetAccess(address, nbytes, &access, 1)


cdef CUresult page_unmap(Place* place, uint64_t address, uint64_t nbytes) noexcept nogil:
    return place.table.cuMemUnmap(address, nbytes)


cdef CUresult page_release(Place* place, uint64_t memory) noexcept nogil:
    return place.table.cuMemRelease(memory)

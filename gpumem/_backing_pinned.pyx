"""Pinned host memory, filled in parallel; see _backing_pages.

cuMemHostAlloc makes its pages one by one on one core. Pages made here by several cores, in huge
pages, and registered afterwards are several times faster (bench/pinned.py), from about one huge
page on. Below that, and where the device cannot use the host's addresses for registered memory
or the driver will not register, cuMemHostAlloc it is.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free

from gpumem._backing cimport (
    Backing,
    Mapped,
    backing_init,
    backing_note,
    host_release,
    host_reserve,
    mapped_add,
    mapped_find,
    mapped_take,
)
from gpumem._backing_pages cimport HUGE_PAGE, pages_map, pages_round, pages_unmap
from gpumem._driver cimport (
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
    CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE,
    CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdevice_attribute,
    CUdeviceptr,
    CUresult,
    Place,
    place_enter,
    place_leave,
)

cdef enum:
    FLOOR = HUGE_PAGE           # bytes; a smaller region is cuMemHostAlloc's


cdef void pinned_init(Backing* backing, Place* place) noexcept nogil:
    backing_init(backing, place)
    backing.reserve = host_reserve
    backing.release = host_release
    backing.call = "cuMemHostAlloc"
    if not can_register(place):
        return
    backing.reserve = pinned_reserve
    backing.release = pinned_release
    backing.node = attribute(place, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1)


cdef bint can_register(Place* place) noexcept nogil:
    return (place.table.cuMemHostRegister != NULL and place.table.cuMemHostUnregister != NULL
            and place.table.cuMemHostGetDevicePointer != NULL
            and attribute(place, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0)
            and attribute(place, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 0))


cdef int attribute(Place* place, CUdevice_attribute which, int otherwise) noexcept nogil:
    cdef int value = otherwise
    if place.table.cuDeviceGetAttribute(&value, which, place.device) != CUDA_SUCCESS:
        return otherwise
    return value


cdef CUresult pinned_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUresult code = CUDA_ERROR_NOT_SUPPORTED
    if size >= FLOOR:
        code = registered_reserve(self, size, address)
    if code == CUDA_SUCCESS or code == CUDA_ERROR_OUT_OF_MEMORY:
        return code
    return host_reserve(self, size, address)


cdef CUresult registered_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef uint64_t nbytes = pages_round(size)
    cdef uint64_t pages = pages_map(nbytes, self.node)
    cdef CUresult code
    if pages == 0:
        return CUDA_ERROR_OUT_OF_MEMORY
    code = place_enter(self.place)
    if code == CUDA_SUCCESS:
        code = register_pages(self, pages, nbytes)
        place_leave(self.place)
    if code != CUDA_SUCCESS:
        pages_unmap(pages, nbytes)
        return code
    address[0] = pages
    return CUDA_SUCCESS


cdef CUresult register_pages(Backing* self, uint64_t pages, uint64_t nbytes) noexcept nogil:
    cdef CUdeviceptr seen = 0
    cdef CUresult code = backing_note(self, "cuMemHostRegister", self.place.table.cuMemHostRegister(
        <void*>pages, nbytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemHostGetDevicePointer",
                        self.place.table.cuMemHostGetDevicePointer(&seen, <void*>pages, 0))
    if code == CUDA_SUCCESS and seen != pages:
        code = CUDA_ERROR_NOT_SUPPORTED     # a block has one address, for the CPU and the device
    if code == CUDA_SUCCESS and mapped_add(self, pages, nbytes, 0) == NULL:
        code = CUDA_ERROR_OUT_OF_MEMORY
    if code != CUDA_SUCCESS:
        self.place.table.cuMemHostUnregister(<void*>pages)
    return code


cdef CUresult pinned_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # While the driver refuses, the device may still write there: pages and their record stay.
    cdef CUresult code = CUDA_SUCCESS
    cdef Mapped* mapped
    if mapped_find(self, address) == NULL:
        return host_release(self, address, size)
    code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemHostUnregister",
                        self.place.table.cuMemHostUnregister(<void*>address))
    place_leave(self.place)
    if code == CUDA_SUCCESS:
        mapped = mapped_take(self, address)
        pages_unmap(address, mapped.nbytes)
        free(mapped)
    return code

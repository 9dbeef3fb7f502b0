"""Pinned host memory: pages made by several threads, then registered with the driver.

cuMemHostAlloc makes its pages one by one on one core. Pages that several cores make, in huge pages
(host_pages.h), and that are registered afterwards are several times faster (bench/pinned.py), from
about one huge page on. cuMemHostAlloc serves smaller regions, and devices that cannot use the
host's addresses for registered memory or whose driver does not register it.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free

from gpumem._native.backing.device cimport (
    Backing, backing_init, backing_note, host_release, host_reserve, Mapped, mapped_add,
    mapped_find, mapped_remove,
)
from gpumem._native.driver cimport (
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUdevice_attribute, CUdeviceptr, CUresult, DeviceContext,
)
from gpumem._support.memory cimport munmap


cdef extern from "host_pages.h" nogil:
    bint host_pages_begin(HostPages* pages, size_t nbytes, int node)
    char* host_pages_take(HostPages* pages, size_t nbytes)
    size_t whole_pages(size_t nbytes)

cdef extern from "<sys/mman.h>" nogil:
    int msync(void* at, size_t nbytes, int flags)
    enum:
        MS_ASYNC

cdef enum:
    FLOOR = 2097152         # 2 MiB, a huge page: a smaller region is cuMemHostAlloc's


cdef void pinned_init(Backing* backing, DeviceContext* context) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = host_reserve
    backing.release = host_release
    backing.waits = True
    backing.call = "cuMemHostAlloc"
    if not can_register(context):
        return
    backing.reserve = pinned_reserve
    backing.release = pinned_release
    backing.node = attribute(context, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1)


cdef bint can_register(DeviceContext* context) noexcept nogil:
    return (context.table.cuMemHostRegister != NULL and context.table.cuMemHostUnregister != NULL
            and context.table.cuMemHostGetDevicePointer != NULL
            and attribute(context, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0)
            and attribute(context, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 0))


cdef int attribute(DeviceContext* context, CUdevice_attribute which, int otherwise) noexcept nogil:
    cdef int value = otherwise
    if context.table.cuDeviceGetAttribute(&value, which, context.device) != CUDA_SUCCESS:
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
    cdef HostPages pages
    cdef CUresult code
    if not host_pages_begin(&pages, size, self.node):
        return CUDA_ERROR_OUT_OF_MEMORY
    code = pinned_take(self, &pages, size, address)
    host_pages_end(&pages)
    return code


cdef void pinned_begin(Backing* self, HostPages* pages, uint64_t nbytes) noexcept nogil:
    if self.reserve == pinned_reserve and nbytes >= FLOOR:
        host_pages_begin(pages, nbytes, self.node)


cdef CUresult pinned_take(Backing* self, HostPages* pages, uint64_t size,
                          uint64_t* address) noexcept nogil:
    cdef uint64_t taken = <uint64_t>host_pages_take(pages, size)
    cdef uint64_t nbytes = whole_pages(size)
    cdef CUresult code
    if taken == 0:
        return CUDA_ERROR_OUT_OF_MEMORY
    code = pages_pin(self, taken, nbytes, 0)
    if code != CUDA_SUCCESS:
        munmap(<void*>taken, nbytes)
    address[0] = taken
    return code


cdef CUresult pages_pin(Backing* self, uint64_t pages, uint64_t nbytes,
                        uint64_t memory) noexcept nogil:
    cdef CUdeviceptr seen = 0
    cdef CUresult code = backing_note(
        self, "cuMemHostRegister", self.context.table.cuMemHostRegister(
            <void*>pages, nbytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemHostGetDevicePointer",
                        self.context.table.cuMemHostGetDevicePointer(&seen, <void*>pages, 0))
    if code == CUDA_SUCCESS and seen != pages:
        code = CUDA_ERROR_NOT_SUPPORTED     # a block has one address, for the CPU and the device
    if code == CUDA_SUCCESS and mapped_add(self, pages, nbytes, memory) == NULL:
        code = CUDA_ERROR_OUT_OF_MEMORY
    if code != CUDA_SUCCESS:
        self.context.table.cuMemHostUnregister(<void*>pages)
    return code


cdef CUresult pinned_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # While the driver refuses, the device may still write there: pages and their record stay.
    cdef CUresult code
    cdef Mapped* mapped
    if mapped_find(self, address) == NULL:
        return host_release(self, address, size)
    code = backing_note(self, "cuMemHostUnregister",
                        self.context.table.cuMemHostUnregister(<void*>address))
    if code == CUDA_SUCCESS:
        mapped = mapped_remove(self, address)
        munmap(<void*>address, mapped.nbytes)
        free(mapped)
    return code


cdef bint pages_exist(uint64_t address, uint64_t nbytes) noexcept nogil:
    # The kernel looks at its list of mappings, not at pages.
    cdef uint64_t page = whole_pages(1)
    cdef uint64_t first = address // page * page
    return msync(<void*>first, address + nbytes - first, MS_ASYNC) == 0

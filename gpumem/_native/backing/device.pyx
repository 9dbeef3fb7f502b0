"""Backings of one driver allocation per region: device, host and managed memory."""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from gpumem._native.driver cimport (
    context_enter, context_leave, CU_MEM_ATTACH_GLOBAL, CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEM_LOCATION_TYPE_HOST, CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE,
    CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUdeviceptr, CUmem_advise, CUmemAccessDesc, CUmemLocation, CUresult, CUstream, DeviceContext,
)
from gpumem._support.atomics cimport pointer_try, published_pointer, store64, sum_add


cdef enum:
    QUANTUM = 256


cdef void backing_init(Backing* backing, DeviceContext* context) noexcept nogil:
    memset(backing, 0, sizeof(Backing))
    backing.context = context
    backing.granule = QUANTUM
    backing.node = -1
    backing.reserve = device_reserve
    backing.release = device_release if context.frees_in_order else memory_release
    backing.waits = not context.frees_in_order
    backing.call = "cuMemAlloc"


cdef bint backing_frees_in_order(const Backing* backing) noexcept nogil:
    return backing.release == device_release


cdef CUresult device_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = self.context.table.cuMemAlloc(&pointer, size)
    address[0] = pointer
    return backing_note(self, "cuMemAlloc", code)


cdef CUresult device_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUstream stream = NULL
    cdef CUresult code = free_stream_of(self, &stream)
    if code == CUDA_SUCCESS:
        code = backing_note(self, "cuMemFreeAsync",
                            self.context.table.cuMemFreeAsync(address, stream))
    # Only after this wait is the memory free for others. Of its result nothing depends: the free is
    # queued, and the region is the driver's.
    if code == CUDA_SUCCESS:
        self.context.table.cuStreamSynchronize(stream)
    return code


cdef CUresult free_stream_of(Backing* self, CUstream* stream) noexcept nogil:
    # One per device, made at the first need. It is never destroyed, as the context is not.
    cdef DeviceContext* context = self.context
    cdef CUstream made = NULL
    cdef CUresult code
    stream[0] = <CUstream>published_pointer(&context.free_stream)
    if stream[0] != NULL:
        return CUDA_SUCCESS
    code = backing_note(self, "cuStreamCreate",
                        context.table.cuStreamCreate(&made, CU_STREAM_NON_BLOCKING))
    if code != CUDA_SUCCESS:
        return code
    if not pointer_try(<void**>&context.free_stream, NULL, made):
        context.table.cuStreamDestroy(made)         # another thread was faster
    stream[0] = <CUstream>published_pointer(&context.free_stream)
    return CUDA_SUCCESS


cdef CUresult memory_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    return backing_note(self, "cuMemFree", self.context.table.cuMemFree(address))


cdef CUresult host_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    # Portable: pinned in every device's context. Mapped: the device may use it as well.
    cdef void* pointer = NULL
    cdef CUresult code = self.context.table.cuMemHostAlloc(
        &pointer, size, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)
    address[0] = <uint64_t>pointer
    return backing_note(self, "cuMemHostAlloc", code)


cdef CUresult host_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    return backing_note(self, "cuMemFreeHost", self.context.table.cuMemFreeHost(<void*>address))


cdef void listed_init(Backing* backing, DeviceContext* context) noexcept nogil:
    # Other processes may have a region open by a legacy handle, which only cuMemFree accepts.
    backing_init(backing, context)
    backing.reserve = listed_reserve
    backing.release = listed_release
    backing.waits = True


cdef CUresult listed_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUresult code = device_reserve(self, size, address)
    if code == CUDA_SUCCESS and mapped_add(self, address[0], size, 0) == NULL:
        memory_release(self, address[0], size)
        return CUDA_ERROR_OUT_OF_MEMORY
    return code


cdef CUresult listed_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code = memory_release(self, address, size)
    if code == CUDA_SUCCESS:
        free(mapped_remove(self, address))
    return code


# ---- what the family shares ----------------------------------------------------------------------

cdef CUresult backing_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    # A source is Python code, which chooses its device itself.
    cdef CUresult code
    if self.source != NULL:
        return self.reserve(self, size, address)
    code = context_enter(self.context)
    if code == CUDA_SUCCESS:
        code = self.reserve(self, size, address)
        context_leave(self.context)
    return code


cdef CUresult backing_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code
    if self.source != NULL:
        return self.release(self, address, size)
    # Refused in a fork's child: the memory is the parent's.
    code = context_enter(self.context)
    if code == CUDA_SUCCESS:
        code = self.release(self, address, size)
        context_leave(self.context)
    return code


cdef CUresult backing_set_access(Backing* self, const CUmemAccessDesc* place) noexcept nogil:
    cdef const Mapped* mapped = self.mapped
    cdef CUresult code = CUDA_SUCCESS
    if not self.has_handles:
        return CUDA_SUCCESS
    while mapped != NULL and code == CUDA_SUCCESS:
        # Without a handle it is being released: nothing uses it.
        if mapped.memory:
            code = backing_note(self, "cuMemSetAccess", self.context.table.cuMemSetAccess(
                mapped.address, mapped.nbytes, place, 1))
        mapped = mapped.next
    return code


cdef CUresult backing_note(Backing* self, const char* call, CUresult code) noexcept nogil:
    # The name of the latest refusal, for the error; a success keeps the one before.
    sum_add(&self.calls, 1)
    if code != CUDA_SUCCESS:
        self.call = call
    return code


cdef Mapped* mapped_add(Backing* self, uint64_t address, uint64_t nbytes,
                        uint64_t memory) noexcept nogil:
    cdef Mapped* mapped = <Mapped*>malloc(sizeof(Mapped))
    if mapped == NULL:
        return NULL
    mapped.next = self.mapped
    mapped.address = address
    mapped.nbytes = nbytes
    mapped.memory = memory
    mapped.asleep = False
    self.mapped = mapped
    store64(&self.mapped_bytes, self.mapped_bytes + nbytes)
    return mapped


cdef Mapped* mapped_find(const Backing* self, uint64_t address) noexcept nogil:
    cdef Mapped* mapped = self.mapped
    while mapped != NULL and mapped.address != address:
        mapped = mapped.next
    return mapped


cdef Mapped* mapped_around(const Backing* self, uint64_t address) noexcept nogil:
    cdef Mapped* mapped = self.mapped
    while mapped != NULL and not (mapped.address <= address < mapped.address + mapped.nbytes):
        mapped = mapped.next
    return mapped


cdef Mapped* mapped_remove(Backing* self, uint64_t address) noexcept nogil:
    # Released only by the caller, after the driver has unmapped it.
    cdef Mapped** link = &self.mapped
    cdef Mapped* found
    while link[0] != NULL and link[0].address != address:
        link = &link[0].next
    found = link[0]
    if found != NULL:
        link[0] = found.next
        store64(&self.mapped_bytes, self.mapped_bytes - found.nbytes)
    return found


# ---- Managed memory ------------------------------------------------------------------------------
#
# The driver's functions for hints took a device until CUDA 12.1 and take a location since 12.2.
# driver/cuda fills one entry or the other by the driver's version: the filled one is called.


cdef void managed_init(Backing* backing, DeviceContext* context) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = managed_reserve
    backing.release = memory_release        # the driver has no other free for it
    backing.waits = True
    backing.call = "cuMemAllocManaged"


cdef CUresult managed_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = self.context.table.cuMemAllocManaged(&pointer, size, CU_MEM_ATTACH_GLOBAL)
    address[0] = pointer
    return backing_note(self, "cuMemAllocManaged", code)


cdef CUmemLocation location_of(int where) noexcept nogil:
    cdef CUmemLocation location
    location.type = CU_MEM_LOCATION_TYPE_HOST if where == HOST_SIDE else CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0 if where == HOST_SIDE else where
    return location


cdef CUresult managed_advise(DeviceContext* context, uint64_t address, uint64_t nbytes,
                             CUmem_advise advice, int where) noexcept nogil:
    # Before 12.2 the CPU is device -1, as HOST_SIDE is.
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    code = CUDA_ERROR_NOT_SUPPORTED
    if context.table.cuMemAdvise != NULL:
        code = context.table.cuMemAdvise(address, nbytes, advice, location_of(where))
    elif context.table.cuMemAdvise_v1 != NULL:
        code = context.table.cuMemAdvise_v1(address, nbytes, advice, where)
    context_leave(context)
    return code


cdef CUresult managed_prefetch(DeviceContext* context, uint64_t address, uint64_t nbytes, int where,
                               CUstream stream) noexcept nogil:
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    code = CUDA_ERROR_NOT_SUPPORTED
    if context.table.cuMemPrefetchAsync != NULL:
        code = context.table.cuMemPrefetchAsync(address, nbytes, location_of(where), 0, stream)
    elif context.table.cuMemPrefetchAsync_v1 != NULL:
        code = context.table.cuMemPrefetchAsync_v1(address, nbytes, where, stream)
    context_leave(context)
    return code

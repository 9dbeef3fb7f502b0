"""Backings by plain driver blocks: one driver allocation per region; see _backing.pxd."""

from libc.stdint cimport uint64_t

from gpumem._driver cimport (
    CU_MEM_ATTACH_GLOBAL,
    CU_MEMHOSTALLOC_DEVICEMAP,
    CU_MEMHOSTALLOC_PORTABLE,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUresult,
    Place,
    place_enter,
    place_leave,
)


cdef void backing_init(Backing* backing, BackingKind kind, Place* place) noexcept nogil:
    backing.place = place
    backing.calls = 0
    if kind == BACKING_PINNED:
        backing.reserve = pinned_reserve
        backing.release = pinned_release
    elif kind == BACKING_MANAGED:
        backing.reserve = managed_reserve
        backing.release = device_release
    else:
        backing.reserve = device_reserve
        backing.release = device_release


cdef const char* backing_call(BackingKind kind) noexcept nogil:
    """Name the driver call that reserves, for messages."""
    if kind == BACKING_PINNED:
        return "cuMemHostAlloc"
    if kind == BACKING_MANAGED:
        return "cuMemAllocManaged"
    return "cuMemAlloc"


cdef CUresult device_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = self.place.table.cuMemAlloc(&pointer, size)
    place_leave(self.place)
    self.calls += 1
    address[0] = pointer
    return code


cdef CUresult device_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = self.place.table.cuMemFree(address)
    place_leave(self.place)
    self.calls += 1
    return code


cdef CUresult pinned_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef void* pointer = NULL
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = self.place.table.cuMemHostAlloc(
        &pointer, size, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)
    place_leave(self.place)
    self.calls += 1
    address[0] = <uint64_t>pointer
    return code


cdef CUresult pinned_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = self.place.table.cuMemFreeHost(<void*>address)
    place_leave(self.place)
    self.calls += 1
    return code


cdef CUresult managed_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = self.place.table.cuMemAllocManaged(&pointer, size, CU_MEM_ATTACH_GLOBAL)
    place_leave(self.place)
    self.calls += 1
    address[0] = pointer
    return code

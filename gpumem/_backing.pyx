"""Backings by plain driver blocks: one driver allocation per region; see _backing.pxd."""

from libc.stdint cimport uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memset

from gpumem._driver cimport (
    CU_MEMHOSTALLOC_DEVICEMAP,
    CU_MEMHOSTALLOC_PORTABLE,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUresult,
    Place,
    place_enter,
    place_leave,
)

cdef enum:
    QUANTUM = 256


cdef void backing_init(Backing* backing, Place* place) noexcept nogil:
    memset(backing, 0, sizeof(Backing))
    backing.place = place
    backing.granule = QUANTUM
    backing.node = -1
    backing.reserve = device_reserve
    backing.release = device_release
    backing.call = "cuMemAlloc"


cdef CUresult device_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemAlloc", self.place.table.cuMemAlloc(&pointer, size))
    place_leave(self.place)
    address[0] = pointer
    return code


cdef CUresult device_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemFree", self.place.table.cuMemFree(address))
    place_leave(self.place)
    return code


cdef CUresult host_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef void* pointer = NULL
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemHostAlloc", self.place.table.cuMemHostAlloc(
        &pointer, size, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP))
    place_leave(self.place)
    address[0] = <uint64_t>pointer
    return code


cdef CUresult host_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code = place_enter(self.place)
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemFreeHost", self.place.table.cuMemFreeHost(<void*>address))
    place_leave(self.place)
    return code


# ---- what the family shares ----------------------------------------------------------------------

cdef CUresult backing_note(Backing* self, const char* call, CUresult code) noexcept nogil:
    self.calls += 1
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
    self.mapped = mapped
    self.mapped_bytes += nbytes
    return mapped


cdef Mapped* mapped_find(const Backing* self, uint64_t address) noexcept nogil:
    cdef Mapped* mapped = self.mapped
    while mapped != NULL and mapped.address != address:
        mapped = mapped.next
    return mapped


cdef Mapped* mapped_take(Backing* self, uint64_t address) noexcept nogil:
    cdef Mapped** hook = &self.mapped
    cdef Mapped* found
    while hook[0] != NULL:
        found = hook[0]
        if found.address == address:
            hook[0] = found.next
            self.mapped_bytes -= found.nbytes
            return found
        hook = &found.next
    return NULL

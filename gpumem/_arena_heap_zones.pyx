"""Guards and patterns; see _arena_heap_zones.pxd."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from gpumem._arena_heap_types cimport (
    DebugHeap,
    HEAP_LATE_WRITE,
    HEAP_OVERRUN,
    HEAP_RESTING,
    HEAP_SEEN,
    HEAP_STRAY_WRITE,
    HEAP_UNDERRUN,
    HeapBlock,
    HeapFault,
    HeapFinding,
)
from gpumem._bfc cimport round_to_quantum
from gpumem._driver cimport (
    CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUresult,
    CUstreamCaptureMode,
    Place,
    place_enter,
    place_leave,
    place_relax,
    place_restore,
)

cdef enum:
    STAGED = 1 << 20        # bytes that come from the device at once

# Part of a block that holds one byte value; the offset is from the user's first byte.
cdef struct Zone:
    int64_t offset
    uint64_t nbytes
    int value               # -1: whatever
    HeapFault fault         # that another value means


cdef Zone front_of(const DebugHeap* heap, const HeapBlock* block) noexcept nogil:
    return Zone(-<int64_t>heap.settings.guard, heap.settings.guard, heap.settings.guard_byte,
                HEAP_UNDERRUN)


cdef Zone body_of(const HeapBlock* block, int value) noexcept nogil:
    return Zone(0, block.asked, value, HEAP_STRAY_WRITE if block.strayed else HEAP_LATE_WRITE)


cdef Zone rear_of(const DebugHeap* heap, const HeapBlock* block) noexcept nogil:
    cdef uint64_t end = round_to_quantum(block.asked) + heap.settings.guard
    return Zone(block.asked, end - block.asked, heap.settings.guard_byte, HEAP_OVERRUN)


# ---- what happens to a block ---------------------------------------------------------------------

cdef CUresult block_prepare(DebugHeap* heap, Place* place, const HeapBlock* block) noexcept nogil:
    cdef Zone zones[3]
    zones[0] = front_of(heap, block)
    zones[1] = body_of(block, heap.settings.fresh_byte)
    zones[2] = rear_of(heap, block)
    return fill(heap, place, block.address, zones, 3)


cdef CUresult block_lay(DebugHeap* heap, Place* place, const HeapBlock* block) noexcept nogil:
    cdef Zone body = body_of(block, heap.settings.freed_byte)
    return fill(heap, place, block.address, &body, 1)


cdef CUresult block_examine(DebugHeap* heap, Place* place, const HeapBlock* block,
                            HeapFinding** findings) noexcept nogil:
    cdef Zone zones[3]
    cdef CUresult code = CUDA_SUCCESS
    cdef int i
    zones[0] = front_of(heap, block)
    zones[1] = rear_of(heap, block)
    zones[2] = body_of(block, heap.settings.freed_byte if block.state == HEAP_RESTING else -1)
    findings[0] = NULL
    for i in range(3):
        if code == CUDA_SUCCESS and zones[i].value >= 0 and zones[i].nbytes != 0:
            code = examine(heap, place, block, &zones[i], findings)
    return code


cdef CUresult examine(DebugHeap* heap, Place* place, const HeapBlock* block, const Zone* zone,
                      HeapFinding** findings) noexcept nogil:
    cdef HeapFinding found
    cdef CUresult code
    memset(&found, 0, sizeof(found))
    code = scan(heap, place, block.address, zone, &found)
    if code != CUDA_SUCCESS or found.wrong == 0:
        return code
    found.fault = zone.fault
    found.block = block[0]
    found.expected = <uint8_t>zone.value
    keep(&found, findings)
    return fill(heap, place, block.address, zone, 1)


cdef void keep(const HeapFinding* found, HeapFinding** findings) noexcept nogil:
    cdef HeapFinding* kept = <HeapFinding*>malloc(sizeof(HeapFinding))
    if kept != NULL:
        kept[0] = found[0]
        kept.next = findings[0]
        findings[0] = kept


# ---- filling -------------------------------------------------------------------------------------

cdef CUresult fill(DebugHeap* heap, Place* place, uint64_t address, const Zone* zones,
                   int count) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int i
    if heap.settings.by_cpu:
        for i in range(count):
            if zones[i].value >= 0:
                memset(<void*>(address + zones[i].offset), zones[i].value, zones[i].nbytes)
        return CUDA_SUCCESS
    code = begin(heap, place, &mode)
    if code != CUDA_SUCCESS:
        return code
    for i in range(count):
        if code == CUDA_SUCCESS and zones[i].value >= 0 and zones[i].nbytes != 0:
            code = place.table.cuMemsetD8Async(address + zones[i].offset,
                                               <unsigned char>zones[i].value, zones[i].nbytes,
                                               heap.stream)
    return end(heap, place, mode, code)


# ---- looking -------------------------------------------------------------------------------------

cdef CUresult scan(DebugHeap* heap, Place* place, uint64_t address, const Zone* zone,
                   HeapFinding* found) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef uint64_t done = 0
    cdef uint64_t part
    if heap.settings.by_cpu:
        compare(<const uint8_t*>(address + zone.offset), zone.nbytes, zone.value, zone.offset,
                found)
        return CUDA_SUCCESS
    code = begin(heap, place, &mode)
    if code != CUDA_SUCCESS:
        return code
    while code == CUDA_SUCCESS and done < zone.nbytes:
        part = min(<uint64_t>STAGED, zone.nbytes - done)
        code = place.table.cuMemcpyDtoHAsync(heap.staging, address + zone.offset + done, part,
                                             heap.stream)
        if code == CUDA_SUCCESS:
            code = place.table.cuStreamSynchronize(heap.stream)
        if code == CUDA_SUCCESS:
            compare(heap.staging, part, zone.value, zone.offset + <int64_t>done, found)
        done += part
    return end(heap, place, mode, code)


cdef void compare(const uint8_t* at, uint64_t nbytes, int value, int64_t offset,
                  HeapFinding* found) noexcept nogil:
    # All bytes are alike if each is like the next one.
    cdef uint64_t i
    if at[0] == value and memcmp(at, at + 1, nbytes - 1) == 0:
        return
    for i in range(nbytes):
        if at[i] == value:
            continue
        if found.wrong == 0:
            found.offset = offset + <int64_t>i
            found.seen_count = <uint32_t>min(<uint64_t>HEAP_SEEN, nbytes - i)
            memcpy(found.seen, at + i, found.seen_count)
        found.wrong += 1


# ---- the heap's own stream -----------------------------------------------------------------------

cdef CUresult begin(DebugHeap* heap, Place* place, CUstreamCaptureMode* mode) noexcept nogil:
    # With the device's context, and what the driver's way needs; `end` leaves it.
    cdef CUresult code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    mode[0] = place_relax(place)
    if heap.staging == NULL:
        heap.staging = <uint8_t*>malloc(STAGED)
        if heap.staging == NULL:
            code = CUDA_ERROR_OUT_OF_MEMORY
    if code == CUDA_SUCCESS and heap.stream == NULL:
        code = place.table.cuStreamCreate(&heap.stream, CU_STREAM_NON_BLOCKING)
    if code != CUDA_SUCCESS:
        place_restore(place, mode[0])
        place_leave(place)
    return code


cdef CUresult end(DebugHeap* heap, Place* place, CUstreamCaptureMode mode,
                  CUresult code) noexcept nogil:
    cdef CUresult last = place.table.cuStreamSynchronize(heap.stream)
    place_restore(place, mode)
    place_leave(place)
    return code if code != CUDA_SUCCESS else last


cdef void zones_end(DebugHeap* heap, Place* place) noexcept nogil:
    free(heap.staging)
    heap.staging = NULL
    if heap.stream != NULL and place_enter(place) == CUDA_SUCCESS:
        place.table.cuStreamDestroy(heap.stream)
        place_leave(place)
    heap.stream = NULL

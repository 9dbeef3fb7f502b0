"""Choosing the driver's copy function, and fills."""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcpy, memset

from gpumem._copy.plan cimport Box, Dim, Rows, rows_box, rows_next
from gpumem._native.driver cimport (
    CU_MEMORYTYPE_UNIFIED, CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUDA_SUCCESS, CUstream, DeviceContext,
)


cdef CallResult rows_queue(DeviceContext* context, CUstream stream, const Rows* rows, Box box,
                           const Peers* peers) noexcept nogil:
    # `left` is at the first byte of the next box; the caller's rows stay as they are.
    cdef Rows left = rows[0]
    cdef CallResult last
    while True:
        if peers != NULL:
            last = queue_peer(context, stream, &left, peers)
        elif box.height < 0:
            last = queue_line(context, stream, &left)
        elif box.depth < 0:
            last = queue_2d(context, stream, &left, &left.dims[box.height])
        else:
            last = queue_3d(context, stream, &left, &left.dims[box.height], &left.dims[box.depth])
        if last.code != CUDA_SUCCESS or not rows_next(&left, box):
            return last


cdef CallResult queue_peer(DeviceContext* context, CUstream stream, const Rows* rows,
                           const Peers* peers) noexcept nogil:
    return call_result(context.table.cuMemcpyPeerAsync(
        rows.to, peers.to.primary, rows.origin, peers.origin.primary, rows.width, stream),
        "cuMemcpyPeerAsync")


cdef CallResult queue_line(DeviceContext* context, CUstream stream,
                           const Rows* rows) noexcept nogil:
    return call_result(context.table.cuMemcpyAsync(rows.to, rows.origin, rows.width, stream),
                       "cuMemcpyAsync")


cdef CallResult queue_2d(DeviceContext* context, CUstream stream, const Rows* rows,
                         const Dim* height) noexcept nogil:
    # Unified: the driver finds out from the addresses which memory each end is.
    cdef CUDA_MEMCPY2D copy
    memset(&copy, 0, sizeof(copy))
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.dstDevice = rows.to
    copy.dstPitch = height.to
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.srcDevice = rows.origin
    copy.srcPitch = height.origin
    copy.WidthInBytes = rows.width
    copy.Height = height.length
    return call_result(context.table.cuMemcpy2DAsync(&copy, stream), "cuMemcpy2DAsync")


cdef CallResult queue_3d(DeviceContext* context, CUstream stream, const Rows* rows,
                         const Dim* height, const Dim* depth) noexcept nogil:
    # As above; a slice is `depth` bytes from the next, which the driver wants in rows.
    cdef CUDA_MEMCPY3D copy
    memset(&copy, 0, sizeof(copy))
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.dstDevice = rows.to
    copy.dstPitch = height.to
    # In rows of the pitch, not in bytes.
    copy.dstHeight = depth.to // height.to
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.srcDevice = rows.origin
    copy.srcPitch = height.origin
    copy.srcHeight = depth.origin // height.origin
    copy.WidthInBytes = rows.width
    copy.Height = height.length
    copy.Depth = depth.length
    return call_result(context.table.cuMemcpy3DAsync(&copy, stream), "cuMemcpy3DAsync")


# ---- Filling with one value ----------------------------------------------------------------------

cdef bint fill_is_word(uint64_t address, const uint8_t* value, size_t itemsize) noexcept nogil:
    return (is_one_byte(value, itemsize)
            or ((itemsize == 2 or itemsize == 4) and address % itemsize == 0))


cdef CallResult fill_queue(DeviceContext* context, CUstream stream, uint64_t address,
                           const uint8_t* value, size_t itemsize, int64_t count) noexcept nogil:
    cdef size_t total = itemsize * count
    cdef size_t done = 0
    cdef size_t part
    cdef CallResult last
    if is_one_byte(value, itemsize):
        return queue_words(context, stream, address, value, 1, total)
    if fill_is_word(address, value, itemsize):
        return queue_words(context, stream, address, value, itemsize, count)
    # The first element word by word: a call takes its value with it, so `value` may end with this
    # call, also in a capture. Then the filled part is doubled.
    part = 4 if itemsize % 4 == 0 and address % 4 == 0 else 1
    while done < itemsize:
        last = queue_words(context, stream, address + done, value + done, part, 1)
        if last.code != CUDA_SUCCESS:
            return last
        done += part
    while done < total:
        part = min(done, total - done)
        last = call_result(context.table.cuMemcpyDtoDAsync(address + done, address, part, stream),
                           "cuMemcpyDtoDAsync")
        if last.code != CUDA_SUCCESS:
            return last
        done += part
    return last


cdef CallResult spread_queue(DeviceContext* context, CUstream stream,
                             const Rows* rows) noexcept nogil:
    # Doubled, too, from the inside: what a dimension has so far is copied behind itself.
    cdef CallResult last = call_result(CUDA_SUCCESS, "")
    cdef Rows part = rows[0]
    cdef const Dim* dim
    cdef int64_t done
    cdef int i
    for i in range(rows.ndim - 1, -1, -1):
        dim = &rows.dims[i]
        part.ndim = rows.ndim - i
        memcpy(part.dims, dim, part.ndim * sizeof(Dim))
        done = 1
        while done < dim.length:
            part.to = rows.to + done * dim.to
            part.dims[0].length = min(done, dim.length - done)
            last = rows_queue(context, stream, &part, rows_box(&part), NULL)
            if last.code != CUDA_SUCCESS:
                return last
            done += part.dims[0].length
    return last


cdef CallResult queue_words(DeviceContext* context, CUstream stream, uint64_t address,
                            const uint8_t* value, size_t width, size_t count) noexcept nogil:
    cdef uint32_t word = 0
    memcpy(&word, value, width)
    if width == 1:
        return call_result(context.table.cuMemsetD8Async(address, word, count, stream),
                           "cuMemsetD8Async")
    if width == 2:
        return call_result(context.table.cuMemsetD16Async(address, word, count, stream),
                           "cuMemsetD16Async")
    return call_result(context.table.cuMemsetD32Async(address, word, count, stream),
                       "cuMemsetD32Async")


cdef void fill_by_cpu(uint8_t* address, const uint8_t* value, size_t itemsize,
                      int64_t count) noexcept nogil:
    cdef size_t total = itemsize * count
    cdef size_t done = itemsize
    cdef size_t part
    if is_one_byte(value, itemsize):
        memset(address, value[0], total)
        return
    # Doubled, too: a few long copies instead of `count` short ones.
    memcpy(address, value, itemsize)
    while done < total:
        part = min(done, total - done)
        memcpy(address + done, address, part)
        done += part


cdef bint is_one_byte(const uint8_t* value, size_t itemsize) noexcept nogil:
    # So zeros of every type are one memset.
    cdef size_t i
    for i in range(1, itemsize):
        if value[i] != value[0]:
            return False
    return True

"""Choosing the driver's copy function; see _copy_driver.pxd."""

from libc.stdint cimport int64_t
from libc.string cimport memset

from gpumem._copy_plan cimport MOST_DIMS, Box, Rows, rows_next
from gpumem._driver cimport (
    CU_MEMORYTYPE_UNIFIED,
    CUDA_MEMCPY2D,
    CUDA_MEMCPY3D,
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    Place,
)


cdef Answer rows_queue(Place* place, CUstream stream, const Rows* rows, Box box) noexcept nogil:
    cdef int64_t index[MOST_DIMS]
    cdef Rows left = rows[0]
    cdef Answer last
    cdef int i
    for i in range(rows.ndim):
        index[i] = 0
    while True:
        if box.height < 0:
            last = queue_line(place, stream, &left)
        elif box.depth < 0:
            last = queue_2d(place, stream, &left, box)
        else:
            last = queue_3d(place, stream, &left, box)
        if last.code != CUDA_SUCCESS or not rows_next(&left, box, index):
            return last


cdef Answer rows_queue_peer(Place* place, CUstream stream, const Rows* rows, Place* to,
                            Place* origin) noexcept nogil:
    cdef int64_t index[MOST_DIMS]
    cdef Rows left = rows[0]
    cdef CUresult code
    cdef Box row
    cdef int i
    row.height = row.depth = -1
    for i in range(rows.ndim):
        index[i] = 0
    while True:
        code = place.table.cuMemcpyPeerAsync(left.to, to.context, left.origin, origin.context,
                                             left.width, stream)
        if code != CUDA_SUCCESS or not rows_next(&left, row, index):
            return answer(code, "cuMemcpyPeerAsync")


cdef Answer queue_line(Place* place, CUstream stream, const Rows* rows) noexcept nogil:
    return answer(place.table.cuMemcpyAsync(rows.to, rows.origin, rows.width, stream),
                  "cuMemcpyAsync")


# Unified: the driver knows from an address whose memory it is.

cdef Answer queue_2d(Place* place, CUstream stream, const Rows* rows, Box box) noexcept nogil:
    cdef CUDA_MEMCPY2D copy
    memset(&copy, 0, sizeof(copy))
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.dstDevice = rows.to
    copy.dstPitch = rows.to_strides[box.height]
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.srcDevice = rows.origin
    copy.srcPitch = rows.origin_strides[box.height]
    copy.WidthInBytes = rows.width
    copy.Height = rows.shape[box.height]
    return answer(place.table.cuMemcpy2DAsync(&copy, stream), "cuMemcpy2DAsync")


cdef Answer queue_3d(Place* place, CUstream stream, const Rows* rows, Box box) noexcept nogil:
    cdef CUDA_MEMCPY3D copy
    memset(&copy, 0, sizeof(copy))
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.dstDevice = rows.to
    copy.dstPitch = rows.to_strides[box.height]
    copy.dstHeight = rows.to_strides[box.depth] // rows.to_strides[box.height]
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.srcDevice = rows.origin
    copy.srcPitch = rows.origin_strides[box.height]
    copy.srcHeight = rows.origin_strides[box.depth] // rows.origin_strides[box.height]
    copy.WidthInBytes = rows.width
    copy.Height = rows.shape[box.height]
    copy.Depth = rows.shape[box.depth]
    return answer(place.table.cuMemcpy3DAsync(&copy, stream), "cuMemcpy3DAsync")

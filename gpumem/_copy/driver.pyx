"""Choosing the driver's copy function, and fills."""

from libc.stdint cimport int64_t, uint64_t, uint8_t
from libc.string cimport memcpy, memset

from gpumem._buffer cimport (
    Buffer, order_host_writing, order_stream, order_written, own_stream, stream_handle,
)
from gpumem._copy.plan cimport Box, Dim, Rows, rows_next
from gpumem._native.driver cimport (
    check, context_enter, context_leave, CU_MEMORYTYPE_UNIFIED, CUDA_MEMCPY2D, CUDA_MEMCPY3D,
    CUDA_SUCCESS, CUresult, CUstream, DeviceContext, DriverDevice,
)

from gpumem.device import MemoryKind


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

cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1:
    cdef size_t itemsize = len(element)
    cdef const uint8_t* value = element
    if count == 0:
        return 0
    # Host memory without a stream: no driver call, and done when this returns.
    if stream is None and dst.home.memory.kind is MemoryKind.HOST:
        order_host_writing(dst)
        with nogil:
            fill_by_cpu(<uint8_t*>address, value, itemsize, count)
        return 0
    return queue_fill(dst, address, value, itemsize, count, stream)


cdef int queue_fill(Buffer dst, uint64_t address, const uint8_t* value, size_t itemsize,
                    int64_t count, object stream) except -1:
    cdef DriverDevice driver_device = dst.home.driver_device
    cdef CUstream handle = own_stream(dst)
    cdef CUresult code
    if stream is not None:
        stream_handle(stream, driver_device, &handle)
    # Earlier work on the buffer's own stream comes first, and its later work behind the fill.
    order_stream(dst, handle)
    with nogil:
        code = context_enter(&driver_device.context)
        if code == CUDA_SUCCESS:
            code = fill_by_driver(&driver_device.context, handle, address, value, itemsize, count)
            context_leave(&driver_device.context)
    # Also after a failure: the calls before the one that failed are queued.
    order_written(dst, handle)
    check(driver_device.context.table, code, "cuMemsetD8Async")
    return 0


cdef CUresult fill_by_driver(const DeviceContext* context, CUstream stream, uint64_t address,
                             const uint8_t* value, size_t itemsize, int64_t count) noexcept nogil:
    cdef size_t total = itemsize * count
    cdef size_t done = itemsize
    cdef size_t part
    cdef CUresult code
    if is_one_byte(value, itemsize):
        return context.table.cuMemsetD8Async(address, value[0], total, stream)
    # One element comes from the host; then the filled part is doubled on the device. The driver
    # reads pageable memory before it returns, so `value` may end with this call.
    code = context.table.cuMemcpyHtoDAsync(address, value, itemsize, stream)
    while code == CUDA_SUCCESS and done < total:
        part = min(done, total - done)
        code = context.table.cuMemcpyDtoDAsync(address + done, address, part, stream)
        done += part
    return code


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

"""Moving bytes; see _copy.pxd."""

from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from gpumem._buffer cimport Buffer
from gpumem._driver cimport (
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    DriverDevice,
    Place,
    check,
    place_enter,
    place_leave,
)
from gpumem._foreign cimport buffer_is_foreign
from gpumem._layout cimport MAX_RANK
from gpumem._order cimport (
    order_host,
    order_read,
    order_stream,
    order_written,
    own_stream,
    wait_for_stream,
)
from gpumem._stream cimport stream_handle

from gpumem.device import MemoryKind

# How one run of adjacent bytes is moved.
ctypedef CUresult (*mover)(const Place* place, CUstream stream, uint64_t to, uint64_t origin,
                           size_t nbytes) noexcept nogil


cdef int copy_elements(Buffer dst, const Side* to, Buffer src, const Side* origin, int ndim,
                       const int64_t* shape, int64_t itemsize, object stream) except -1:
    if stream is None and is_cpus(dst) and is_cpus(src):
        order_host(src)
        order_host(dst)
        with nogil:
            move_runs(to, origin, ndim, shape, itemsize, move_by_cpu, NULL, NULL)
        return 0
    return queue_copy(dst, to, src, origin, ndim, shape, itemsize, stream)


cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1:
    cdef size_t itemsize = len(element)
    cdef const uint8_t* value = element
    if count == 0:
        return 0
    if stream is None and is_cpus(dst):
        order_host(dst)
        with nogil:
            fill_by_cpu(<uint8_t*>address, value, itemsize, count)
        return 0
    return queue_fill(dst, address, value, itemsize, count, stream)


cdef bint is_cpus(Buffer buffer):
    return buffer.home.memory.kind is MemoryKind.HOST


# ---- on a stream ---------------------------------------------------------------------------------

cdef int queue_copy(Buffer dst, const Side* to, Buffer src, const Side* origin, int ndim,
                    const int64_t* shape, int64_t itemsize, object stream) except -1:
    cdef Buffer driving = dst
    cdef DriverDevice place
    cdef CUstream handle
    cdef CUresult code
    if dst.home.place.type == "host" and src.home.place.type == "cuda":
        driving = src
    place = driving.home.place
    handle = own_stream(driving)
    if stream is not None:
        stream_handle(stream, place, &handle)
    come_after(src, place, handle)
    come_after(dst, place, handle)
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            code = move_runs(to, origin, ndim, shape, itemsize, move_by_driver, &place.place,
                             handle)
            place_leave(&place.place)
    # Also after a refusal: what was queued before it runs.
    if is_joined(src, place) and is_joined(dst, place):
        order_read(src, handle)
        order_written(dst, handle)
    else:
        wait_for_stream(&place.place, handle)
    check(place.place.table, code, "cuMemcpyAsync")
    return 0


cdef int queue_fill(Buffer dst, uint64_t address, const uint8_t* value, size_t itemsize,
                    int64_t count, object stream) except -1:
    cdef DriverDevice place = dst.home.place
    cdef CUstream handle = own_stream(dst)
    cdef CUresult code
    if stream is not None:
        stream_handle(stream, place, &handle)
    come_after(dst, place, handle)
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            code = fill_by_driver(&place.place, handle, address, value, itemsize, count)
            place_leave(&place.place)
    order_written(dst, handle)
    check(place.place.table, code, "cuMemsetD8Async")
    return 0


cdef int come_after(Buffer buffer, DriverDevice place, CUstream stream) except -1:
    if buffer.home.place is place:
        order_stream(buffer, stream)
    else:                       # events do not reach from one driver's device to another's
        order_host(buffer)
    return 0


cdef bint is_joined(Buffer buffer, DriverDevice place) noexcept:
    # Others' memory may go as soon as they hear of our end, and no event reaches another device:
    # such a copy is waited for.
    return buffer.home.place is place and not buffer_is_foreign(buffer)


cdef CUresult fill_by_driver(const Place* place, CUstream stream, uint64_t address,
                             const uint8_t* value, size_t itemsize,
                             int64_t count) noexcept nogil:
    cdef size_t total = itemsize * count
    cdef size_t done = itemsize
    cdef size_t part
    cdef CUresult code
    if is_one_byte(value, itemsize):
        return place.table.cuMemsetD8Async(address, value[0], total, stream)
    # What is filled already is doubled, on the device.
    code = place.table.cuMemcpyHtoDAsync(address, value, itemsize, stream)
    while code == CUDA_SUCCESS and done < total:
        part = min(done, total - done)
        code = place.table.cuMemcpyDtoDAsync(address + done, address, part, stream)
        done += part
    return code


cdef CUresult move_by_driver(const Place* place, CUstream stream, uint64_t to, uint64_t origin,
                             size_t nbytes) noexcept nogil:
    return place.table.cuMemcpyAsync(to, origin, nbytes, stream)


# ---- by the CPU ----------------------------------------------------------------------------------

cdef CUresult move_by_cpu(const Place* place, CUstream stream, uint64_t to, uint64_t origin,
                          size_t nbytes) noexcept nogil:
    memcpy(<void*><uintptr_t>to, <const void*><uintptr_t>origin, nbytes)
    return CUDA_SUCCESS


cdef void fill_by_cpu(uint8_t* address, const uint8_t* value, size_t itemsize,
                      int64_t count) noexcept nogil:
    cdef size_t total = itemsize * count
    cdef size_t done = itemsize
    cdef size_t part
    if is_one_byte(value, itemsize):
        memset(address, value[0], total)
        return
    memcpy(address, value, itemsize)
    while done < total:
        part = min(done, total - done)
        memcpy(address + done, address, part)
        done += part


cdef bint is_one_byte(const uint8_t* value, size_t itemsize) noexcept nogil:
    cdef size_t i
    for i in range(1, itemsize):
        if value[i] != value[0]:
            return False
    return True


# ---- runs ----------------------------------------------------------------------------------------

cdef CUresult move_runs(const Side* to, const Side* origin, int ndim, const int64_t* shape,
                        int64_t itemsize, mover move, const Place* place,
                        CUstream stream) noexcept nogil:
    """Move the longest runs that are adjacent on both sides, one by one, in C order."""
    cdef int64_t index[MAX_RANK]
    cdef int64_t run = itemsize
    cdef int64_t to_offset = 0
    cdef int64_t origin_offset = 0
    cdef int outer = ndim
    cdef int i
    cdef CUresult code
    for i in range(ndim):
        index[i] = 0
        if shape[i] == 0:
            return CUDA_SUCCESS
    while outer > 0 and (shape[outer - 1] == 1 or (to.strides[outer - 1] == run
                                                   and origin.strides[outer - 1] == run)):
        run *= shape[outer - 1]
        outer -= 1
    while True:
        code = move(place, stream, to.address + to_offset, origin.address + origin_offset, run)
        if code != CUDA_SUCCESS:
            return code
        i = outer - 1
        while i >= 0:
            index[i] += 1
            to_offset += to.strides[i]
            origin_offset += origin.strides[i]
            if index[i] < shape[i]:
                break
            to_offset -= index[i] * to.strides[i]
            origin_offset -= index[i] * origin.strides[i]
            index[i] = 0
            i -= 1
        if i < 0:
            return CUDA_SUCCESS

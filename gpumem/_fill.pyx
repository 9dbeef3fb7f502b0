"""Filling with one value; see _fill.pxd."""

from libc.stdint cimport int64_t, uint8_t, uint64_t
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
from gpumem._order cimport order_host_writing, order_stream, order_written, own_stream
from gpumem._stream cimport stream_handle

from gpumem.device import MemoryKind


cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1:
    cdef size_t itemsize = len(element)
    cdef const uint8_t* value = element
    if count == 0:
        return 0
    if stream is None and dst.home.memory.kind is MemoryKind.HOST:
        order_host_writing(dst)
        with nogil:
            fill_by_cpu(<uint8_t*>address, value, itemsize, count)
        return 0
    return queue_fill(dst, address, value, itemsize, count, stream)


cdef int queue_fill(Buffer dst, uint64_t address, const uint8_t* value, size_t itemsize,
                    int64_t count, object stream) except -1:
    cdef DriverDevice place = dst.home.place
    cdef CUstream handle = own_stream(dst)
    cdef CUresult code
    if stream is not None:
        stream_handle(stream, place, &handle)
    order_stream(dst, handle)
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            code = fill_by_driver(&place.place, handle, address, value, itemsize, count)
            place_leave(&place.place)
    order_written(dst, handle)
    check(place.place.table, code, "cuMemsetD8Async")
    return 0


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

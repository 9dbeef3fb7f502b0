"""Copies as driver calls: one where a pitched copy covers it, else the fewest."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer
from gpumem._copy.plan cimport Box, Rows
from gpumem._native.driver cimport CUresult, CUstream, DeviceContext

# What a driver answered, and which call; a failed copy may have moved some of the bytes.
cdef struct Answer:
    CUresult code
    const char* call

cdef inline Answer answer(CUresult code, const char* call) noexcept nogil:
    cdef Answer made
    made.code = code
    made.call = call
    return made

# Queued on a stream of `driver_device`, whose context is current. The box is that of the rows.
cdef Answer rows_queue(DeviceContext* context, CUstream stream, const Rows* rows,
                       Box box) noexcept nogil
# The same between two devices, row by row: a peer copy has one dimension.
cdef Answer rows_queue_peer(DeviceContext* context, CUstream stream, const Rows* rows,
                            DeviceContext* to, DeviceContext* origin) noexcept nogil


# ---- Fills of a buffer's elements, by the CPU or queued on a stream ------------------------------


# Fills `count` adjacent elements with one value, alike; None is the buffer's own stream.
cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1

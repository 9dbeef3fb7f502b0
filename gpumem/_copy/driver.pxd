"""Copies and fills as driver calls: one call where a pitched copy covers it, else the fewest."""

from libc.stdint cimport int64_t, uint64_t, uint8_t

from gpumem._copy.plan cimport Box, Rows
from gpumem._native.driver cimport CUresult, CUstream, DeviceContext

# What the last driver call returned, and its name. A failed copy may have moved some of the bytes.
cdef struct CallResult:
    CUresult code
    const char* call

cdef inline CallResult call_result(CUresult code, const char* call) noexcept nogil:
    cdef CallResult result
    result.code = code
    result.call = call
    return result

# The devices of both ends of a copy between peers.
cdef struct Peers:
    DeviceContext* to
    DeviceContext* origin

# Queued on a stream of `context`, which is current. The box is that of the rows, or one row where
# there are `peers`: a peer copy has one dimension. NULL: both ends are reachable from `context`.
cdef CallResult rows_queue(DeviceContext* context, CUstream stream, const Rows* rows, Box box,
                           const Peers* peers) noexcept nogil
# Fills `count` adjacent elements with one value, queued on a stream of `context`, which is current.
cdef CallResult fill_queue(DeviceContext* context, CUstream stream, uint64_t address,
                           const uint8_t* value, size_t itemsize, int64_t count) noexcept nogil
# Copies the first row to all others: `rows` are of one memory, as both ends of a copy.
cdef CallResult spread_queue(DeviceContext* context, CUstream stream,
                             const Rows* rows) noexcept nogil
# Whether a fill is one call, which copies nothing.
cdef bint fill_is_word(uint64_t address, const uint8_t* value, size_t itemsize) noexcept nogil
# The same, by the CPU at once.
cdef void fill_by_cpu(uint8_t* address, const uint8_t* value, size_t itemsize,
                      int64_t count) noexcept nogil

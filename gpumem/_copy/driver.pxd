"""Copies and fills as driver calls: one call where a pitched copy covers it, else the fewest."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer
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
# Fills `count` adjacent elements with one value, queued on a stream; None is the buffer's own, or
# the CPU does it where the memory is ordinary host memory.
cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1

"""Copies and fills between buffers, on the CPU or queued on a stream."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer

# One side of a copy: elements in a buffer. Strides are in bytes, of the copy's shape.
cdef struct Side:
    uint64_t address
    const int64_t* strides

# Copies one shape of elements. Between host memories, without a stream, the CPU does it before this
# returns; else it is queued on `stream` (None: the destination's own, or the source's if only that
# is a GPU's) and both buffers are ordered around it.
cdef int copy_elements(Buffer dst, const Side* to, Buffer src, const Side* origin, int ndim,
                       const int64_t* shape, int64_t itemsize, object stream) except -1
# Fills `count` adjacent elements with one value, alike; None is the buffer's own stream.
cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1

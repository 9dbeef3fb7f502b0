"""Copies of strided elements between any two buffers."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer

# One end of a copy: elements in a buffer. Strides are in bytes, of the copy's shape.
cdef struct Side:
    uint64_t address
    const int64_t* strides
    bint is_temporary       # the buffer exists for this copy alone: later readers do not use it

# Copies one shape of elements. Between host memories, without a stream, the CPU does it before this
# returns. Else it is queued on `stream` (None: the destination's own, or the source's if only
# that is a GPU's) and both buffers are ordered around it; with pageable memory, or through pinned
# memory, it may be done when this returns. The ends do not overlap.
cdef int copy_elements(Buffer dst, const Side* to, Buffer src, const Side* origin, int ndim,
                       const int64_t* shape, int64_t itemsize, object stream) except -1
# Raises if a copy between the two would be captured into a graph.
cdef int refuse_captured(Buffer dst, Buffer src, object stream) except -1
# Fills `count` adjacent elements with one value, queued on a stream; None is the buffer's own, or
# the CPU does it where the memory is ordinary host memory.
cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1
# The same for any layout, as a part of the graph that the stream captures. False: it captures none,
# and nothing is done.
cdef bint fill_captured(Buffer dst, const Side* to, int ndim, const int64_t* shape, bytes element,
                        object stream) except -1

"""Fills of a buffer's elements, by the CPU or queued on a stream."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer

# Fills `count` adjacent elements with one value, alike; None is the buffer's own stream.
cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1

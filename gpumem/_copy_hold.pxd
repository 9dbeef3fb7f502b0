"""Keeping others' memory until a copy that uses it is done."""

from gpumem._buffer cimport Buffer
from gpumem._driver cimport CUstream, DriverDevice

# Until what is queued on the stream so far is done; waits for it where nothing else is possible.
cdef int hold_until_done(Buffer buffer, DriverDevice place, CUstream stream) except -1

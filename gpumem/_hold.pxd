"""What a NumPy array has as its base."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer

# An object with the buffer protocol over bytes of a buffer, which keeps them.
cdef object hold_bytes(Buffer buffer, uint64_t address, int64_t nbytes, bint read_only)

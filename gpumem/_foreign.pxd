"""Buffers over memory that others own: a DLPack producer's, or a Python object's."""

from libc.stdint cimport uint64_t

from gpumem._buffer cimport Buffer
from gpumem._dlpack cimport Incoming

# A buffer over memory whose owner is `owner`, or is not known yet.
cdef Buffer foreign_buffer(object memory, uint64_t address, uint64_t nbytes, object owner)
# From now on the buffer and its views own a producer's managed tensor, and call its deleter last.
cdef void foreign_adopt(Buffer buffer, const Incoming* incoming) noexcept

"""Tensors over memory that others made, for C callers."""

from libc.stdint cimport uint64_t

from gpumem._buffer cimport Buffer, Incoming
from gpumem._tensor.tensor cimport Tensor

# Checked, but not the owner of the managed tensor yet: foreign_adopt makes it that.
cdef Tensor tensor_of_incoming(const Incoming* incoming)
# A tensor over the memory of an array of any library; None if `x` has none that could be shared.
cdef Tensor tensor_seeing(object x)


# ---- Buffers over memory that others own: a DLPack producer's, or a Python object's --------------


# A buffer over memory whose owner is `owner`, or is not known yet.
cdef Buffer foreign_buffer(object memory, uint64_t address, uint64_t nbytes, object owner)
# From now on the buffer and its views own a producer's managed tensor, and call its deleter last.
cdef void foreign_adopt(Buffer buffer, const Incoming* incoming) noexcept

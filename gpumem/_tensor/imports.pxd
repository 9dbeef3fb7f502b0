"""Tensors and buffers over memory of other libraries."""

from libc.stdint cimport uint64_t

from gpumem._buffer cimport Buffer, Incoming
from gpumem._tensor.tensor cimport Tensor

# Checked, but the managed tensor is not owned before foreign_adopt.
cdef Tensor tensor_of_incoming(const Incoming* incoming)
# A tensor over the memory of an array of any library; None if `x` has no memory to share.
cdef Tensor tensor_seeing(object x)
# A buffer over memory whose owner is `owner`; None: foreign_adopt names it.
cdef Buffer foreign_buffer(object memory, uint64_t address, uint64_t nbytes, object owner)
# Makes the buffer and its views own a producer's managed tensor, whose deleter is called last.
cdef void foreign_adopt(Buffer buffer, const Incoming* incoming) noexcept

"""Tensors and buffers over memory of other libraries."""

from gpumem._buffer cimport Incoming
from gpumem._tensor.tensor cimport Tensor

# Takes over a producer's managed tensor; after a failure it is still the producer's.
cdef Tensor tensor_of_incoming(const Incoming* incoming, object stream=*)
# A tensor over the memory of an array of any library; None if `x` has no memory to share.
cdef Tensor tensor_seeing(object x, object stream=*)

"""Tensors and buffers over memory of other libraries."""

from libc.stdint cimport int64_t

from gpumem._buffer cimport DLTensor, Incoming
from gpumem._tensor.layout cimport Layout
from gpumem._tensor.tensor cimport Tensor

# Reads and checks what a DLPack tensor says of its shape, for a layout in C order.
cdef int read_shape(const DLTensor* described, int64_t itemsize, Layout* layout) except -1
# Takes over a producer's managed tensor; after a failure it is still the producer's.
cdef Tensor tensor_of_incoming(const Incoming* incoming, object stream=*)
# A tensor over the memory of an array of any library; None if `x` has no memory to share.
cdef Tensor tensor_seeing(object x, object stream=*)

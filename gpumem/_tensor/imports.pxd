"""Tensors and buffers over memory of other libraries."""

from gpumem._tensor.tensor cimport Tensor

# A tensor over the memory of an array of any library; None if `x` has no memory to share.
cdef Tensor tensor_seeing(object x, object stream=*)

"""Tensors over memory that others made, for C callers."""

from gpumem._dlpack cimport Incoming
from gpumem._tensor cimport Tensor

# Checked, but not the owner of the managed tensor yet: foreign_adopt makes it that.
cdef Tensor tensor_of_incoming(const Incoming* incoming)
# A tensor over the memory of an array of any library; None if `x` has none that could be shared.
cdef Tensor tensor_seeing(object x)

"""Tensors over memory that others made, for C callers."""

from gpumem._dlpack cimport Incoming
from gpumem._tensor cimport Tensor

# Checked, but not the owner of the managed tensor yet: foreign_adopt makes it that.
cdef Tensor tensor_of_incoming(const Incoming* incoming)

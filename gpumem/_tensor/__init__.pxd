"""Tensors: views, layouts, protocols."""

from gpumem._tensor.layout cimport element_of, ElementType, MAX_RANK
from gpumem._tensor.tensor cimport Tensor, tensor_new

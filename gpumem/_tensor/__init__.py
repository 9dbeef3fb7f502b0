"""Typed views of memory.

``tensor`` has `Tensor`, ``layout`` shapes and strides as numbers. ``create`` and ``like`` make
tensors of new memory, ``imports`` of memory that others made, with DLPack's C exchange API.
``virtual`` has `VirtualTensor`: its rows are committed and released. ``copy_out`` copies tensors to
a file or to the CPU in a thread.
"""

from gpumem._tensor.create import copy, empty, full, tensor_of, zeros
from gpumem._tensor.imports import asarray, from_dlpack
from gpumem._tensor.like import empty_like, ones, zeros_like
from gpumem._tensor.tensor import Tensor
from gpumem._tensor.virtual import VirtualTensor

__all__ = [
    "Tensor",
    "VirtualTensor",
    "asarray",
    "copy",
    "empty",
    "empty_like",
    "from_dlpack",
    "full",
    "ones",
    "tensor_of",
    "zeros",
    "zeros_like",
]

"""Typed views of memory: making them, and seeing what others made as one."""

import gpumem._exchange  # noqa: F401  (fills in the table that Tensor's type shows)
from gpumem._copy_ring import staging_arena
from gpumem._create import empty, full, zeros
from gpumem._imports import asarray, from_dlpack
from gpumem._tensor import Tensor
from gpumem._transfer import copy

__all__ = [
    "Tensor",
    "asarray",
    "copy",
    "empty",
    "from_dlpack",
    "full",
    "staging_arena",
    "zeros",
]

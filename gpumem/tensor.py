"""Typed views of memory: making them, and seeing what others made as one."""

import gpumem._exchange  # noqa: F401  (fills in the table that Tensor's type shows)
from gpumem._create import empty, full, zeros
from gpumem._imports import asarray, from_dlpack
from gpumem._tensor import Tensor

__all__ = ["Tensor", "asarray", "empty", "from_dlpack", "full", "zeros"]

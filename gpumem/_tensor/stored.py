"""Tensors over arrays that are to be stored, in a file or for other processes."""

from __future__ import annotations

from typing import Any

from gpumem._tensor.imports import asarray
from gpumem._tensor.tensor import Tensor
from gpumem.errors import GpumemError


def stored_tensor(name: str, array: Any) -> Tensor:
    """Return a tensor over an array that is to be stored; a refusal names it.

    PyTorch exports no tensor that requires a gradient or is conjugated, and a negated one as if it
    were not.
    """
    try:
        if hasattr(array, "resolve_neg"):
            array = array.detach().resolve_conj().resolve_neg()
        return asarray(array)
    except GpumemError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} cannot be exported: {error}") from error

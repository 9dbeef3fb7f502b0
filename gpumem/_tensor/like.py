"""Tensors of new memory with ones, or with the shape, dtype and memory of another array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict, Unpack

from gpumem._tensor.create import _seen, empty, full, zeros

if TYPE_CHECKING:
    import numpy.typing as npt

    from gpumem._buffer.resource import MemoryResource
    from gpumem._buffer.stream import _StreamLike
    from gpumem._tensor.tensor import Tensor
    from gpumem.device import Device, MemoryInfo


class Where(TypedDict, total=False):
    """The memory of a new tensor: keywords of `empty`."""

    memory: MemoryInfo | Device | str | None
    resource: MemoryResource | None
    environment: Any
    stream: _StreamLike
    shareable: bool


def ones(
    shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike, **where: Unpack[Where]
) -> Tensor:
    """Return a tensor of new memory with ones, as `full`.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.ones(3, "int16", memory="host").numpy()
    array([1, 1, 1], dtype=int16)
    """
    return full(shape, 1, dtype, **where)


def empty_like(array: object, dtype: npt.DTypeLike | None = None, **where: Unpack[Where]) -> Tensor:
    """Return a tensor of new memory with arbitrary bytes, like another array.

    Parameters
    ----------
    array : array
        As the source of `copy`; its elements are not read.
    dtype : dtype, optional
        None: that of `array`.
    **where
        As `empty`: memory, resource, environment, stream, shareable. Without the first three it is
        the default resource of the array's memory.

    Examples
    --------
    >>> import gpumem, numpy
    >>> gpumem.empty_like(numpy.ones((2, 3), "float32")).shape
    (2, 3)
    """
    like = _seen(array, "array")
    return empty(like.shape, like.dtype if dtype is None else dtype, **_beside(like, where))


def zeros_like(array: object, dtype: npt.DTypeLike | None = None, **where: Unpack[Where]) -> Tensor:
    """Return a tensor of new memory with zeros in all bytes, like another array.

    The arguments are those of `empty_like`.

    Examples
    --------
    >>> import gpumem, numpy
    >>> gpumem.zeros_like(numpy.ones(3), "int16").numpy()
    array([0, 0, 0], dtype=int16)
    """
    like = _seen(array, "array")
    return zeros(like.shape, like.dtype if dtype is None else dtype, **_beside(like, where))


def _beside(like: Tensor, where: Where) -> Where:
    if any(where.get(name) is not None for name in ("memory", "resource", "environment")):
        return where
    return {**where, "memory": like.memory}

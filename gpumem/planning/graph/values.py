"""Values: the tensors of a graph, as far as their memory goes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from gpumem.errors import ModelGraphError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Shape", "Value"]

Shape: TypeAlias = tuple[int | str | None, ...]


@final
class Value:
    """A tensor in a graph. Compared by identity: equal names in two bodies are two values.

    Parameters
    ----------
    name : str
        Not empty.
    dtype : dtype, optional
        Of its elements; None if it is unknown or the value is not a tensor. 4-bit elements take
        a byte each, as in NumPy.
    shape : sequence of int, str or None, optional
        Lengths; a name or None for one that is only known when the graph runs. None: not even the
        number of dimensions is known.
    is_initializer : bool
        Whether it is a weight: it exists before the graph runs.

    Raises
    ------
    ModelGraphError
        An empty name, a shape that is not a sequence, a negative length, or a weight of
        unknown size.

    Examples
    --------
    >>> Value("x", "float32", (2, 3)).nbytes, Value("y", "float32", ("batch", 3)).nbytes
    (24, None)
    """

    __slots__ = ("_dtype", "_is_initializer", "_name", "_shape")

    def __init__(
        self,
        name: str,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int | str | None] | None = None,
        *,
        is_initializer: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ModelGraphError(f"a value's name is a string that is not empty, not {name!r}")
        self._name = name
        self._dtype = None if dtype is None else np.dtype(dtype)
        if shape is not None and (isinstance(shape, str) or not isinstance(shape, Iterable)):
            raise ModelGraphError(
                f"shape {shape!r:.80} of {name!r} is not a sequence of lengths, or None"
            )
        self._shape = None if shape is None else tuple(_length(name, one) for one in shape)
        self._is_initializer = is_initializer
        if is_initializer and self.nbytes is None and self._dtype != np.dtype(object):
            raise ModelGraphError(f"weight {name!r} has no known size: {self!r}")

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Of its elements."""
        return self._dtype

    @property
    def shape(self) -> Shape | None:
        """Lengths of its dimensions."""
        return self._shape

    @property
    def is_initializer(self) -> bool:
        """Whether it is a weight."""
        return self._is_initializer

    @property
    def nbytes(self) -> int | None:
        """Bytes; None where they are only known when the graph runs, and for strings."""
        if self._dtype is None or self._dtype.hasobject or self._shape is None:
            return None
        lengths = [length for length in self._shape if isinstance(length, int)]
        if len(lengths) < len(self._shape):
            return None
        return math.prod(lengths) * self._dtype.itemsize

    def __repr__(self) -> str:
        shape = "?" if self._shape is None else "x".join(str(n or "?") for n in self._shape)
        kind = "weight " if self._is_initializer else ""
        return f"Value({kind}{self._name}: {self._dtype or '?'}[{shape}])"


def _length(name: str, length: object) -> int | str | None:
    if length is None or isinstance(length, str):
        return length or None
    if isinstance(length, bool) or not hasattr(type(length), "__index__"):
        raise ModelGraphError(f"length {length!r} of {name!r} is not an integer, a name or None")
    number = operator.index(length)  # type: ignore[arg-type]
    if number < 0:
        raise ModelGraphError(f"length {number} of {name!r} is negative")
    return number

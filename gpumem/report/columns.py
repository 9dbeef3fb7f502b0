"""Columns of whole numbers as text that a page can hold: narrow, deflated, in base64."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["column"]

_WIDTHS = (("u1", 1 << 8), ("u2", 1 << 16), ("u4", 1 << 32))
_MOST = 1 << 53  # what a double holds exactly, and JavaScript has no other number


def column(values: ArrayLike, *, rising: bool = False) -> dict[str, Any]:
    """Write whole numbers as a column.

    Parameters
    ----------
    values : array_like of int, shape (n,)
        0 to 2**53.
    rising : bool, optional
        Write the differences of values that never decrease.

    Returns
    -------
    dict
        ``type`` of what is stored ("u1", "u2", "u4" or "f8"), ``length``, ``unit`` by which every
        stored number is to be multiplied, ``rising``, and ``data``: zlib's format in base64.

    Raises
    ------
    ValueError
        A number below 0 or above 2**53, or a drop where `rising` was said.

    Examples
    --------
    >>> written = column([512, 1024, 4096], rising=True)
    >>> written["type"], written["unit"], written["length"]
    ('u1', 512, 3)
    """
    numbers = np.asarray(values).astype(np.int64)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) <= _MOST:
        raise ValueError(f"a column takes 0..{_MOST}, not {numbers.min()}..{numbers.max()}")
    if rising:
        numbers = np.diff(numbers, prepend=0)
        if numbers.size and int(numbers.min()) < 0:
            raise ValueError("a rising column never decreases")
    unit = max(int(np.gcd.reduce(numbers)) if numbers.size else 1, 1)
    stored = numbers // unit
    most = int(np.max(stored, initial=0))
    width = next((name for name, limit in _WIDTHS if most < limit), "f8")
    packed = zlib.compress(stored.astype(f"<{width}").tobytes(), 6)
    return {
        "type": width,
        "length": int(numbers.size),
        "unit": unit,
        "rising": rising,
        "data": base64.b64encode(packed).decode("ascii"),
    }

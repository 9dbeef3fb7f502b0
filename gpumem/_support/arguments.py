"""What refuses an argument of a wrong type: an error that names the value and what is accepted."""

from __future__ import annotations

import operator
from typing import NoReturn

__all__ = ["power_of_two", "refuse", "require"]


def refuse(name: str, value: object, accepted: str) -> NoReturn:
    """Raise TypeError."""
    raise TypeError(f"{name} = {value!r:.80} is not accepted: it takes {accepted}")


def require(name: str, value: object, kind: type | tuple[type, ...], accepted: str) -> None:
    """Raise TypeError unless `value` is one of `kind`."""
    if not isinstance(value, kind):
        refuse(name, value, accepted)


def power_of_two(name: str, value: object, most: int, shown: str) -> int:
    """Return a power of two, or raise ValueError. NumPy's integers count, a bool does not."""
    if not isinstance(value, bool) and hasattr(type(value), "__index__"):
        number = operator.index(value)  # type: ignore[arg-type]
        if 1 <= number <= most and not number & (number - 1):
            return number
    raise ValueError(f"{name} {value!r:.80} is not a power of two from 1 to {shown}")

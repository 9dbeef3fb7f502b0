"""Checks of arguments: errors that name the value and what is accepted."""

from __future__ import annotations

import operator
from typing import NoReturn, TypeGuard

from gpumem._support.texts import shown

__all__ = ["is_integer", "is_number", "power_of_two", "refuse", "require"]


def refuse(name: str, value: object, accepted: str) -> NoReturn:
    """Raise TypeError."""
    raise TypeError(f"invalid {name} = {shown(value, 80)}: expected {accepted}")


def require(name: str, value: object, kind: type | tuple[type, ...], accepted: str) -> None:
    """Raise TypeError unless `value` is one of `kind`."""
    if not isinstance(value, kind):
        refuse(name, value, accepted)


def power_of_two(name: str, value: object, most: int, most_shown: str) -> int:
    """Return a power of two, or raise ValueError. NumPy's integers count, a bool does not."""
    if not isinstance(value, bool) and hasattr(type(value), "__index__"):
        number = operator.index(value)  # type: ignore[arg-type]
        if 1 <= number <= most and not number & (number - 1):
            return number
    raise ValueError(f"{name} {shown(value, 80)} is not a power of two from 1 to {most_shown}")


def is_integer(value: object, least: int, most: int) -> TypeGuard[int]:
    """Tell whether `value` is an int, and not a bool, from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    """Tell whether `value` is an int or a float, and not a bool, from `least` to `most`."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most  # type: ignore[operator]

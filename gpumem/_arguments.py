"""What refuses an argument of a wrong type: an error that names the value and what is accepted."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["refuse", "require"]


def refuse(name: str, value: object, accepted: str) -> NoReturn:
    """Raise TypeError."""
    raise TypeError(f"{name} = {value!r:.80} is not accepted: it takes {accepted}")


def require(name: str, value: object, kind: type | tuple[type, ...], accepted: str) -> None:
    """Raise TypeError unless `value` is one of `kind`."""
    if not isinstance(value, kind):
        refuse(name, value, accepted)

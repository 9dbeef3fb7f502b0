"""Checks of arguments: errors that name the value and the accepted values."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, NoReturn, TypeGuard

from gpumem._support.texts import shown
from gpumem.errors import ConfigError

MISSING: Final = object()
"""The default of a required parameter, if the callee has a better error than Python."""


def refuse(name: str, value: object, accepted: str) -> NoReturn:
    """Raise TypeError."""
    raise TypeError(f"invalid {name} = {shown(value, 80)}: expected {accepted}")


def require(name: str, value: object, kind: type | tuple[type, ...], accepted: str) -> None:
    """Raise TypeError unless `value` is one of `kind`."""
    if not isinstance(value, kind):
        refuse(name, value, accepted)


def require_settings(
    settings: Mapping[str, object],
    keys: Iterable[str],
    callee: str,
    meant: Mapping[str, str] | None = None,
) -> None:
    """Raise TypeError unless `settings` is a Mapping, and ConfigError for a key not in `keys`."""
    require("settings", settings, Mapping, "a Mapping of a session's configuration")
    for key in settings:
        if key not in keys:
            raise ConfigError(unknown("key", key, callee, keys, meant))


def require_each(
    name: str, values: object, kind: type | tuple[type, ...], accepted: str
) -> tuple[Any, ...]:
    """Return the values of an iterable; raise TypeError unless each of them is one of `kind`."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        refuse(name, values, f"an iterable, each of it {accepted}")
    found = tuple(values)
    for value in found:
        require(f"value of {name}", value, kind, accepted)
    return found


def require_name(name: object) -> None:
    """Raise TypeError unless a name is a str or None, and ValueError where C would cut it."""
    require("name", name, (str, type(None)), "a str or None")
    if isinstance(name, str) and "\0" in name:
        raise ValueError(f"invalid name = {name!r}: expected no NUL character")


def unknown(
    what: str,
    name: object,
    callee: str,
    names: Iterable[str],
    meant: Mapping[str, str] | None = None,
) -> str:
    """Return a text that a name is not known: first a similar name, then all known names.

    Parameters
    ----------
    what : str
        Such as ``"key"``.
    name : object
        The unknown name.
    callee : str
        The call or object that it was passed to.
    names : iterable of str
        The names that the callee accepts.
    meant : mapping, optional
        Names that other libraries use, and those of `names` that they stand for.

    Examples
    --------
    >>> unknown("key", "max_men", "an arena", ["max_mem", "backing"])
    "unknown key 'max_men': did you mean 'max_mem'? an arena takes max_mem, backing"
    """
    known = list(names)
    bare = name.rpartition(".")[2] if isinstance(name, str) else ""  # a key may have a prefix
    near = [meant[bare]] if meant and bare in meant else get_close_matches(bare, known, 1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {what} {shown(name)}: {guess}{callee} takes {', '.join(known)}"


def refuse_keywords(
    callee: str,
    given: Iterable[str],
    names: Iterable[str],
    meant: Mapping[str, str] | None = None,
) -> None:
    """Raise TypeError for the first of the keywords that a call does not accept, if any."""
    for name in given:
        raise TypeError(unknown("keyword", name, callee, names, meant))


def refuse_call(
    name: str,
    first: str,
    such: str,
    given: tuple[object, ...],
    others: Iterable[str],
    *,
    most: int,
    keywords: Collection[str],
    meant: Mapping[str, str] | None = None,
) -> NoReturn:
    """Raise TypeError for invalid arguments of a call, mostly of a constructor.

    Parameters
    ----------
    name : str
        The name of the callee.
    first : str
        Its first parameter, which is required.
    such : str
        Examples of accepted values.
    given : tuple
        The arguments by position; `MISSING` first, if there are none.
    others : iterable of str
        Keywords that it does not accept.
    most : int
        The number of arguments that it accepts by position.
    keywords : collection of str
        All that it accepts; those that may be passed by position first.
    meant : mapping, optional
        As of `unknown`.
    """
    refuse_keywords(f"{name}()", others, keywords, meant)
    if given[0] is MISSING:
        raise TypeError(f"{name}({first}): give {such}")
    names = ", ".join(list(keywords)[:most])
    raise TypeError(f"{name}() takes by position only {names}, and {len(given)} were given")


def is_same_file(path: str | os.PathLike[str], others: Iterable[object]) -> bool:
    """Return whether a file is one of others, under any name; only paths are compared."""
    for other in others:
        if isinstance(other, str | os.PathLike):
            try:
                if os.path.samefile(path, other):
                    return True
            except (OSError, ValueError):  # one does not exist
                continue
    return False


def power_of_two(name: str, value: object, most: int, most_shown: str) -> int:
    """Return a power of two, or raise ValueError. NumPy's integers count, a bool does not."""
    number = whole_number(value)
    if number is not None and 1 <= number <= most and not number & (number - 1):
        return number
    raise ValueError(f"{name} {shown(value, 80)} is not a power of two from 1 to {most_shown}")


def whole_number(value: object) -> int | None:
    """Return an integer of Python or NumPy as an int; None: it is not one, or a bool."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None  # an array of several elements has the method


def is_integer(value: object, least: int, most: int) -> TypeGuard[int]:
    """Return whether `value` is an int, and not a bool, from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    """Return whether `value` is an int or a float, and not a bool, from `least` to `most`."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most  # type: ignore[operator]

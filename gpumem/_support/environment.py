"""How environment variables are read: the same words mean on and off in each."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from gpumem.errors import ConfigError, ConfigWarning

_WORDS = dict.fromkeys(("", "0", "false", "no", "off"), False)
_WORDS |= dict.fromkeys(("1", "true", "yes", "on"), True)
# Code that is not the program's own: gpumem, and Python's import system.
_PASSED = (str(Path(__file__).parents[1]), "<frozen importlib", "<frozen runpy")


def read_switch(text: str) -> bool | None:
    """Return whether a variable's value means on or off, in any case; None for anything else."""
    return _WORDS.get(text.lower())


def warn_of_variable(text: str) -> None:
    """Give a ConfigWarning about a variable, at the program's line that made gpumem read it."""
    # Compiled code has no frames, so `stacklevel` would count into Python's import.
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, ConfigWarning, *place, registry=registry)


def vary(name: str, default: int) -> int:
    """Return a number for which ``gpumem predict --vary`` searches the largest that fits.

    That command, and ``gpumem.prediction.largest``, run the program with other values of the name.
    Else it is the default, unless the environment variable ``GPUMEM_VARY`` has a value for the
    name, such as ``batch=64``.

    Raises
    ------
    ConfigError
        The value in the variable is not a number.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.vary("batch", 8)
    8
    """
    varied, _, value = os.environ.get("GPUMEM_VARY", "").partition("=")
    if varied != name:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"invalid GPUMEM_VARY = {os.environ['GPUMEM_VARY']!r}: expected a name and a whole "
            f"number, such as {name}={default}"
        ) from None

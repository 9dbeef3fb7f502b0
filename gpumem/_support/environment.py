"""How environment variables are read: the same words mean on and off in each."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from gpumem.errors import ConfigWarning

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

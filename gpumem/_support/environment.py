"""How environment variables are read: the same words mean on and off in each."""

from __future__ import annotations

__all__ = ["read_switch"]

_WORDS = {"": False, "0": False, "false": False, "1": True, "true": True}


def read_switch(text: str) -> bool | None:
    """Return whether a variable's value means on or off, in any case; None for anything else."""
    return _WORDS.get(text.lower())

"""Texts for errors and tables of any values: short, in one line, printable."""

from __future__ import annotations

import reprlib

_MAX_REASON = 200  # characters of a reason

# A pickle of some hundred bytes can hold lists that need gigabytes as text.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 1000


def visible(text: str) -> str:
    """Escape characters that a terminal would interpret or not show, as Python does."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, noun: str) -> str:
    """Write a number of things: ``1 block``, ``2,000 blocks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def reason(error: Exception) -> str:
    """Write another library's error in one line."""
    text = visible(" ".join(str(error).split()))
    return text[:_MAX_REASON] or type(error).__name__


def shown(value: object, most: int = 60) -> str:
    """Write any value as a text of at most `most` characters, also where its repr fails."""
    try:
        return _SHORT.repr(value)[:most]
    except (ValueError, RecursionError):  # thousands of digits, or of lists in lists
        return f"of type {type(value).__name__} and too large to show"

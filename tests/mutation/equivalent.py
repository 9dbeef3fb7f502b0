"""Mutants that have no effect, as equivalent.txt lists them with their reasons.

An entry is a line that names file and function, the lines before and after the change, and the
reason, on one or more lines:

    gpumem/_native/bfc/table.pyx bfc_has
    - before
    + after
    = why no program can tell them apart
"""

from __future__ import annotations

from pathlib import Path

from .mutants import Mutant

FILE = Path(__file__).with_name("equivalent.txt")
Key = tuple[str, str, str]


def key_of(mutant: Mutant) -> Key:
    return f"{mutant.file} {mutant.function}", mutant.before, mutant.after


def listed(text: str | None = None) -> dict[Key, str]:
    """Read the list: mutants and reasons."""
    found: dict[Key, str] = {}
    place = before = after = ""
    for line in (FILE.read_text() if text is None else text).splitlines():
        mark, rest = line[:2], line[2:].strip()
        if mark == "- ":
            before = rest
        elif mark == "+ ":
            after = rest
        elif mark == "= ":
            key = (place, before, after)
            found[key] = f"{found[key]} {rest}" if key in found else rest
        elif line.strip() and not line.startswith("#"):
            place = line.strip()
    return found

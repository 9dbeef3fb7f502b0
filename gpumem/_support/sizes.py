"""Sizes in bytes as text with units."""

from __future__ import annotations

import re
from typing import Any

from gpumem._support.arguments import whole_number
from gpumem._support.texts import shown, visible
from gpumem.errors import ConfigError

MAX_BYTES = (1 << 63) - 1

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = r"([0-9]{1,30})(?:\.([0-9]{1,30}))?\s*([a-z]*)"  # compiled at its first use


def parse_size(text: str) -> int:
    """Read a number of bytes.

    Parameters
    ----------
    text : str
        Plain bytes, or a number and a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB,
        GB, TB (powers of 1000), in any case. A fraction must give whole bytes.

    Returns
    -------
    int
        Bytes, 0 to 2**63 - 1.

    Raises
    ------
    ConfigError
        Anything else.

    Examples
    --------
    >>> parse_size("512MiB"), parse_size("2GB"), parse_size("1.5 KiB")
    (536870912, 2000000000, 1536)
    """
    match = _match(text)
    unit = _UNITS.get(match[3].lower()) if match else None
    if match and unit:
        decimals = match[2] or ""
        scale: int = 10 ** len(decimals)
        nbytes, part = divmod(int(match[1] + decimals) * unit, scale)
        if part == 0 and nbytes <= MAX_BYTES:
            return nbytes
    accepted = (
        "expected whole bytes from 0 to 2**63 - 1, plain or with a unit such as 512MiB or 2GB"
    )
    raise ConfigError(f"invalid size {shown(text, 60)}: {nearly_a_size(text) or accepted}")


def nearly_a_size(value: object) -> str | None:
    """Return how to write a value that is almost a size; None for any other value.

    Examples
    --------
    >>> nearly_a_size("20G")
    'G is ambiguous, write "20GiB" or "20GB"'
    >>> nearly_a_size(1e9)
    'bytes are an integer, write int(1e9) or "1GB"'
    """
    if isinstance(value, str):
        # The letter means powers of 1024 in some programs, of 1000 in others.
        match = _match(value)
        if match is None or match[3].lower() not in ("k", "m", "g", "t"):
            return None
        number = value.strip()[: match.start(3)].strip()
        letter = match[3].upper()
        decimal = f"{number}{'k' if letter == 'K' else letter}B"
        return f'{match[3]} is ambiguous, write "{number}{letter}iB" or "{decimal}"'
    if not isinstance(value, float) or not value.is_integer() or not 0 <= value <= MAX_BYTES:
        return None
    brief = f"{value:g}".replace("e+0", "e").replace("e+", "e")
    number = brief if float(brief) == value else repr(value)
    return f'bytes are an integer, write int({number}) or "{_with_unit(int(value))}"'


def _with_unit(nbytes: int) -> str:
    """Write bytes exactly, with the unit that leaves the fewest digits."""
    texts = [
        f"{nbytes // _UNITS[unit.lower()]}{unit}"
        for unit in ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
        if nbytes % _UNITS[unit.lower()] == 0
    ]
    return min(texts, key=len)


def is_size_with_unit(text: str) -> bool:
    """Return whether `text` is a number followed by a unit of size."""
    match = _match(text)
    return match is not None and match[3].lower() in _UNITS and match[3] != ""


def is_share(value: object) -> bool:
    """Return whether `value` is meant as a share of a device's memory, ``"80%"``."""
    return isinstance(value, str) and value.rstrip().endswith("%")


def share_of(name: str, text: str, total: int) -> int:
    """Return a share of `total` bytes, rounded down.

    Raises
    ------
    ConfigError
        It is not above 0 and at most 100 percent.

    Examples
    --------
    >>> share_of("max_mem", "80%", 1000), share_of("max_mem", "12.5 %", 1000)
    (800, 125)
    """
    match = re.fullmatch(r"\s*([0-9]{1,3})(?:\.([0-9]{1,9}))?\s*%\s*", text, re.ASCII)
    if match:
        decimals = match[2] or ""
        whole: int = 100 * 10 ** len(decimals)
        if 0 < (part := int(match[1] + decimals)) <= whole:
            return total * part // whole
    raise ConfigError(
        f"invalid {visible(name)} = {shown(text)}: expected a percentage of the device's memory, "
        "above 0% and at most 100%, or a size in bytes"
    )


def _match(text: str) -> re.Match[str] | None:
    return re.fullmatch(_SIZE, text.strip(), re.IGNORECASE | re.ASCII)


def whole_bytes(name: str, value: Any, *, accepts_none: bool = False) -> int:
    """Return bytes that are an integer of any range, or a text with a unit of size.

    `accepts_none`: the caller has handled None before, and the error says that it is accepted.
    """
    if isinstance(value, str) and is_size_with_unit(value):
        return parse_size(value)
    number = whole_number(value)
    if number is None:
        if better := nearly_a_size(value):
            raise TypeError(f"invalid {name} = {value!r}: {better}")
        given = repr(value[:40]) if isinstance(value, str) else type(value).__name__
        accepted = 'an integer or a size such as "512MiB"'
        if accepts_none:
            accepted = 'an integer or None, or a size such as "512MiB"'
        raise TypeError(f"{name} must be {accepted}, not {given}")
    return number


def format_size(nbytes: int) -> str:
    """Write bytes with a unit, in powers of 1024 and four digits or less.

    Examples
    --------
    >>> format_size(0), format_size(1023), format_size(1536), format_size(12_024_970_848)
    ('0 B', '1023 B', '1.5 KiB', '11.2 GiB')
    """
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while abs(size) >= 1023.95 and len(units) > 1:  # 1023.95 would print as 1024.0
        size, units = size / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def exact_size(nbytes: int) -> str:
    """Write bytes with a unit, followed by the exact number where that rounds it.

    Examples
    --------
    >>> exact_size(1023), exact_size(1536), exact_size(1537)
    ('1023 B', '1.5 KiB', '1.5 KiB (1537 bytes)')
    """
    if abs(nbytes) >= 1 << 64:  # more than any memory, perhaps more than a float holds
        return f"{nbytes} bytes"
    text = format_size(nbytes)
    number, unit = text.split()
    return (
        text
        if float(number) * _UNITS.get(unit.lower(), 0) == nbytes
        else f"{text} ({nbytes} bytes)"
    )

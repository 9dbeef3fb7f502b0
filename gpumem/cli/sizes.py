"""Sizes as people write them; how they are shown is in gpumem._support.sizes."""

from __future__ import annotations

import re
from fractions import Fraction

from gpumem.errors import ConfigError

__all__ = ["is_size_with_unit", "parse_size"]

MOST = (1 << 63) - 1

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
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


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
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    size = Fraction(match[1]) * unit if match and unit else None
    if size is None or size.denominator != 1 or size > MOST:
        raise ConfigError(
            f"invalid size {text!r:.60}: expected whole bytes from 0 to 2**63 - 1, plain "
            "or with a unit such as 512MiB or 2GB"
        )
    return int(size)


def is_size_with_unit(text: str) -> bool:
    """Tell whether `text` is a number with a unit of size behind it."""
    match = _SIZE.fullmatch(text.strip())
    return match is not None and match[2].lower() in _UNITS and match[2] != ""

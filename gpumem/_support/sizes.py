"""Sizes as people read them."""

from __future__ import annotations

__all__ = ["format_size"]


def format_size(nbytes: int) -> str:
    """Write bytes for people, in powers of 1024 and four digits or less.

    Examples
    --------
    >>> format_size(0), format_size(1023), format_size(1536), format_size(12_024_970_848)
    ('0 B', '1023 B', '1.5 KiB', '11.2 GiB')
    """
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while abs(size) >= 1023.95 and len(units) > 1:  # 1023.95 would print as 1024.0
        size, units = size / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"

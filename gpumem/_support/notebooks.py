"""Tables of names and values as HTML, which a notebook shows instead of a repr."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table with a heading; all texts are escaped."""
    lines = (
        f"<tr><th style='text-align: left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"

"""The page: one file of HTML that holds its style, its scripts and its data."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

__all__ = ["page"]

# A script uses those before it.
_SCRIPTS = (
    "format columns theme model groups charts timeline block map moment lanes sizes tables runs "
    "figures link main"
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(title: str, version: str, data: Mapping[str, Any]) -> str:
    """Write the page that draws `data`.

    Parameters
    ----------
    title : str
        Heading of the page, of any characters.
    version : str
        gpumem's.
    data : mapping
        ``runs``, what `run_data` collected of each, and ``shown``, the number of the first shown.
    """
    parts = {
        "title": html.escape(title),
        "version": html.escape(version),
        "styles": _text("uplot/uPlot.min.css") + _text("page.css"),
        "licence": _text("uplot/LICENSE"),
        "uplot": _text("uplot/uPlot.iife.min.js"),
        "scripts": "\n".join(_text(f"{name}.js") for name in _SCRIPTS.split()),
        # No "<" at all, so that no text of a file ends the element that holds it.
        "facts": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return _PLACE.sub(lambda found: parts[found[1]], _text("page.html"))


def _text(name: str) -> str:
    return (files("gpumem.report") / "page" / name).read_text(encoding="utf-8")

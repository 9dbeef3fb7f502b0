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
_SCRIPTS = "format columns model theme charts timeline map lanes sizes tables main"
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
        What `page_data` collected.
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

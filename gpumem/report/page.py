"""The page: one file of HTML that holds its style, its scripts and its data."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from gpumem._support.brackets import parse_json
from gpumem._support.files import open_regular, require_writable
from gpumem._support.version import VERSION
from gpumem.report.processes import text_of

# In this order: a script uses those before it.
_SCRIPTS = (
    "format columns theme model stacks groups tree charts phases timeline block map moment flame "
    "lanes sizes tables runs refused figures link main"
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_FACTS = re.compile(rb'<script id="facts" type="application/json">([^<]*)</script>')


def _page(title: str, data: Mapping[str, Any]) -> str:
    lacks = text_of(data.get("missing", {}))
    parts = {
        "title": html.escape(title),
        "version": html.escape(VERSION),
        "styles": _text("uplot/uPlot.min.css") + _text("page.css"),
        "missing": f'<p class="trouble" role="note">{html.escape(lacks)}</p>' if lacks else "",
        "licence": _text("uplot/LICENSE"),
        "uplot": _text("uplot/uPlot.iife.min.js"),
        "scripts": "\n".join(_text(f"{name}.js") for name in _SCRIPTS.split()),
        # No "<" at all, so that no text of a file ends the element that holds it.
        "facts": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return _PLACE.sub(lambda found: parts[found[1]], _text("page.html"))


def facts_of(path: Path) -> dict[str, Any]:
    """Read the data of a page that `write_page` wrote; empty if the file is not one."""
    try:
        with open_regular(path) as file:
            found = _FACTS.search(file.read())
        facts = parse_json(found[1]) if found else {}
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def write_page(path: Path, title: str, data: Mapping[str, Any]) -> int:
    """Write the page that draws `data`; return its bytes.

    It is first written under another name, so that a reader never finds half of it.

    Parameters
    ----------
    path : Path
    title : str
        Heading of the page, of any characters.
    data : mapping
        ``runs``, the result of `run_data` for each, and ``shown``, the number of the first shown;
        ``job`` and ``missing``, of a page that the processes of a job write together.
    """
    require_writable(path)
    # A title is often a file's name, which is not always UTF-8.
    text = _page(title, data).encode("utf-8", "replace")
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(text)
        beside.replace(path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None  # not `beside`
    finally:
        beside.unlink(missing_ok=True)
    return len(text)


def _text(name: str) -> str:
    return (files("gpumem.report") / "page" / name).read_text(encoding="utf-8")

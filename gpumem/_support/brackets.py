"""JSON, and other texts in brackets: how deeply they are nested."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

# Strings and comments; a string without an end reaches to the end of the text.
_SKIPPED = re.compile(r'(?s)"(?:\\.|[^"\\])*"?|#[^\n]*')


def depth_of(text: str) -> int:
    """Return how many brackets of a text are open at once, at most."""
    depth = deepest = 0
    for bracket in re.findall(r"[][(){}]", _SKIPPED.sub("", text)):
        depth += 1 if bracket in "[({" else -1
        deepest = max(deepest, depth)
    return deepest


def parse_json(data: bytes | str) -> Any:
    """Parse JSON; ValueError if it is malformed or nested too deeply for the interpreter."""
    try:
        return json.loads(data)
    except RecursionError:
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        limit = sys.getrecursionlimit()
        raise ValueError(
            f"it is nested {depth_of(text)} deep, and the recursion limit is {limit}"
        ) from None

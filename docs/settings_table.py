"""The tables of settings.md, from the code; `python docs/settings_table.py` writes them anew."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import gpumem
from gpumem.debugging import DebugHeapOptions

PAGE = Path(__file__).with_name("settings.md")
CLASSES: dict[str, Any] = {
    "arenas": gpumem.ArenaConfig,
    "pools": gpumem.PoolConfig,
    "debug heaps": DebugHeapOptions,
}


def accepted(kind: Any, name: str) -> str:
    """Return the accepted values of a setting, as the error for a wrong value says them."""
    try:
        kind(**{name: object()})
    except gpumem.ConfigError as error:
        text = str(error).partition(": expected ")[2]
        text = re.sub(r"an integer (from \d+ to \d+), or a size.*", r"bytes \1", text)
        return powers(text)
    raise AssertionError(f"{name} accepts anything")


def powers(text: str) -> str:
    """Return a text with the largest sizes as powers of two."""
    return text.replace(str(2**64 - 1), "2**64 - 1").replace(str(2**63 - 1), "2**63 - 1")


def meaning(kind: Any, name: str) -> str:
    """Return the first sentence of a field's description in the class's docstring."""
    described = re.search(
        rf"^ *(?:\w+, )*{name}(?:, \w+)* : .*\n((?:        .*\n|\n)+)", kind.__doc__, re.MULTILINE
    )
    assert described, name
    text = " ".join(described[1].split())
    return re.split(r"(?<=[a-z`)0-9])\.(?: |$)", text)[0].replace("|", "\\|")


def table(kind: Any) -> str:
    """Return the table of a class of settings."""
    defaults = kind()
    rows = ["| setting | default | accepted | meaning |", "| --- | --- | --- | --- |"]
    for each in fields(kind):
        default = powers(defaults._text_of(each.name))
        rows.append(
            f"| `{each.name}` | `{default}` | {accepted(kind, each.name)} | "
            f"{meaning(kind, each.name)} |"
        )
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """Return a page with each table, between its two comments, made anew."""
    for name, kind in CLASSES.items():
        begin, end = f"<!-- settings of {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = before + begin + table(kind) + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

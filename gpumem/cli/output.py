"""Output of the commands: tables or one JSON object on stdout, progress and notices on stderr."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Table

from gpumem._support.sizes import format_size
from gpumem._support.texts import visible

F = TypeVar("F", bound=Mapping[str, Any])

TOO_MUCH = 3
"""Exit status: more memory is needed than there is, or than is allowed."""

# Width in characters if stdout is not a terminal.
_WIDTH_OF_A_FILE = 120

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def notice(text: str) -> None:
    """Print a line about facts that a file lacks, if there are any, on stderr."""
    if text:
        click.echo(f"notice: {visible(text)}", err=True)


def without_folders(name: str) -> str:
    """Return the name of an owner or a stack with its files' names alone."""
    return re.sub(r"\([^()]*/([^/()]+)\)", r"(\1)", name)


def signed_size(nbytes: int) -> str:
    """Return a difference of bytes as text, with its sign."""
    return ("+" if nbytes > 0 else "-" if nbytes < 0 else "") + format_size(abs(nbytes))


def present(facts: F, as_json: bool, show: Callable[[Console, F], None]) -> None:
    """Print facts as one JSON object, or as text by `show`."""
    if as_json:
        print_json(facts)
    else:
        show(stdout(), facts)


def stdout() -> Console:
    """Make a console for the output of a command."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False, width=width)


class _Table(Table):
    """A table of texts, perhaps out of files: a terminal shows control characters, obeys none."""

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*map(visible, cells), **more)


def table(*columns: str, numbers: int = 0, title: str = "") -> Table:
    """Make an empty table; its last `numbers` columns are flush right."""
    made = _Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left")
    for place, column in enumerate(columns):
        right = place >= len(columns) - numbers
        made.add_column(column, justify="right" if right else "left", overflow="fold")
    return made


def pairs(rows: Mapping[str, str], title: str = "") -> Table:
    """Make a table of names and their values."""
    made = _Table(box=None, show_header=False, pad_edge=False, title=title or None)
    made.title_justify = "left"
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in rows.items():
        made.add_row(name, value)
    return made


@contextlib.contextmanager
def progress(step: str) -> Iterator[Callable[[str], None]]:
    """Show `step` as the current step while the block runs; on a terminal only.

    The block receives a function that changes the step that is shown.
    """
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    with Console(stderr=True, markup=False).status(step) as status:
        yield status.update

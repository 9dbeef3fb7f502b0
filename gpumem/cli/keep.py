"""``gpumem keep``: the keeper of sealed sets, and what it holds."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.table import Table

from gpumem import interop
from gpumem._support.sizes import format_size
from gpumem.cli.arguments import FiniteRange, within
from gpumem.cli.output import json_option, print_json, stdout, table
from gpumem.errors import KeeperError
from gpumem.interop import keeper


def _complete_set(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer the sets that are kept."""
    try:
        names = [each["name"] for each in interop.sealed_sets(timeout=1)]
    except KeeperError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(begun)]


@click.command(short_help="Keep sealed sets of tensors, list or drop them.")
@click.option("--list", "as_list", is_flag=True, help="List the sets that are kept.")
@click.option(
    "--drop",
    "name",
    metavar="NAME",
    shell_complete=_complete_set,
    help="Let the keeper forget a set.",
)
@click.option("--force", is_flag=True, help="With --drop: also while processes use the set.")
@click.option(
    "--idle",
    type=within("number", FiniteRange(0)),
    metavar="SECONDS",
    help="End when no set was kept for so long; without it never.",
)
@json_option
def keep(as_list: bool, name: str | None, force: bool, idle: float | None, as_json: bool) -> None:
    """Keep the memory of sealed sets (gpumem.interop.seal) until they are dropped.

    Without --list, --drop or --json this process becomes the keeper, as for a unit of systemd. The
    first seal starts a keeper by itself if none runs.
    """
    if force and name is None:
        raise click.UsageError("--force goes with --drop")
    is_client = as_list or as_json or name is not None
    if is_client and idle is not None:
        raise click.UsageError("--idle does not go with --list, --drop or --json")
    if not is_client:
        options = ["--folder", keeper.folder()]
        options += [] if idle is None else ["--idle", str(idle)]
        # A new program, because this one has gpumem and its libraries in memory.
        os.execv(sys.executable, [sys.executable, "-I", "-S", keeper.__file__, *options])
    if name is not None:
        try:
            interop.drop(name, force=force)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--drop") from None
    sets = interop.sealed_sets()
    if as_json:
        print_json({"sets": sets})
    elif as_list:
        stdout().print(table_of_sets(sets) if sets else "no set is kept")


def table_of_sets(sets: list[dict[str, Any]]) -> Table:
    """Make a row for each set."""
    rows = table("sealed set", "made by", "used by", "tensors", "size", numbers=2)
    for each in sets:
        users = ", ".join(map(str, each["users"])) or "-"
        size = format_size(each["bytes"])
        rows.add_row(each["name"], str(each["process"]), users, str(each["tensors"]), size)
    return rows

"""``gpumem node``: the limits that programs of this machine share."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console

from gpumem._node import NodeView, node_files
from gpumem._support.sizes import format_size
from gpumem.cli.arguments import size_or_share
from gpumem.cli.output import json_option, present
from gpumem.errors import GpumemError
from gpumem.stats import NodeHolder


def _complete_node(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer the nodes of this user."""
    return [CompletionItem(name) for name in node_files() if name.startswith(begun)]


def _read_limit(
    context: click.Context, option: click.Parameter, text: str | None
) -> int | str | None:
    """Read bytes or a share, or the word for no limit."""
    return text if text == "none" else size_or_share(context, option, text)


@click.command(short_help="List or change limits that programs of this machine share.")
@click.option(
    "--limit",
    metavar="SIZE",
    callback=_read_limit,
    help="Set the limit of NAME, such as 20GiB, or 80% of a device's node; none: none of its own.",
)
@click.option("--remove", is_flag=True, help="Remove NAME, which no process uses.")
@json_option
@click.argument("name", required=False, shell_complete=_complete_node)
def node(limit: int | str | None, remove: bool, as_json: bool, name: str | None) -> None:
    """List the nodes of this user, or NAME alone, such as gpu0.

    With --limit and --remove NAME may be one below a node, such as gpu0/tenant-a. The limit holds
    at once, for all programs that use it.
    """
    if name is None and (remove or limit is not None):
        raise click.UsageError("--limit and --remove need NAME")
    if remove and limit is not None:
        raise click.UsageError("--remove does not go with --limit")
    try:
        if name is not None and limit is not None:
            NodeView(name).set_limit(None if limit == "none" else limit)
        if name is not None and remove:
            NodeView(name).remove()
        names = node_files() if name is None else [] if remove else [name.partition("/")[0]]
        facts = facts_of(names)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    present(facts, as_json, show)


def facts_of(names: list[str]) -> dict[str, Any]:
    """Return the names and processes of nodes, or the reason why a node cannot be read."""
    return {"nodes": [_facts_of(each) for each in names]}


def _facts_of(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": name, "error": None, "device": None}
    facts |= {"names": [], "processes": []}
    try:
        view = NodeView(name)
        levels, holders = view.read()
        device = view.device
        if device is not None:
            facts["device"] = {"name": device.name, "ordinal": str(device), "uuid": device.uuid}
    except GpumemError as error:
        return facts | {"error": str(error)}
    return facts | {
        "names": [level._asdict() for level in levels],
        "processes": [holder._asdict() for holder in holders],
    }


def show(console: Console, facts: dict[str, Any]) -> None:
    """Print the tree of each node, with the processes below their names."""
    for each in facts["nodes"]:
        if each["error"]:
            console.print(each["error"], markup=False)
        for level in each["names"]:
            of = "no limit" if level["limit"] is None else f"of {format_size(level['limit'])}"
            text = f"{_title(level['name'], each['device'])}: "
            text += f"{format_size(level['used'])} leased, {of}"
            console.print("  " * level["name"].count("/") + text, markup=False)
            for holder in each["processes"]:
                if holder["name"] == level["name"]:
                    text = "  " * (1 + level["name"].count("/")) + NodeHolder(**holder).who()
                    console.print(f"{text}: {format_size(holder['held'])}", markup=False)


def _title(name: str, device: dict[str, str] | None) -> str:
    """Return a name as the programs write it: with the device in place of its UUID."""
    if device is None:
        return name
    _, slash, rest = name.partition("/")
    return device["ordinal"] + (slash + rest if slash else f", {device['name']}")

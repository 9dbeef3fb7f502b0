"""``gpumem top``: the counters of a running process, read without disturbing it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console, Group
from rich.live import Live

from gpumem._node import node_files
from gpumem._support.sizes import format_size
from gpumem._support.texts import visible
from gpumem.cli.arguments import FiniteRange, within
from gpumem.cli.keep import table_of_sets
from gpumem.cli.node import facts_of, show
from gpumem.cli.output import json_option, print_json, stdout, table
from gpumem.cli.top_sums import sums_of
from gpumem.cli.top_view import command_of, state_of, view
from gpumem.errors import KeeperError, NotPublishedError
from gpumem.interop import sealed_sets
from gpumem.observe import LivePage, LiveResource


def _complete_process(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer the processes that publish their counters."""
    return [
        CompletionItem(str(page.process), help=visible(command_of(page.process)))
        for page in _readable()[0]
        if page.alive and str(page.process).startswith(begun)
    ]


@click.command(short_help="Watch the memory of running processes.")
@click.argument(
    "process",
    metavar="[PID]",
    required=False,
    type=within("integer", click.IntRange(1, (1 << 31) - 1)),
    shell_complete=_complete_process,
)
@click.option("--once", is_flag=True, help="Show the counters once and exit.")
@click.option(
    "--interval",
    type=within("number", FiniteRange(0.1, 3600)),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
@json_option
def top(process: int | None, once: bool, interval: float, as_json: bool) -> None:
    """Watch the memory of process PID until q is pressed, or list processes to watch.

    The list ends with the sums of all processes for each GPU, by the machine's numbers of GPUs,
    with the limits that processes share, as `gpumem node` prints them, and with the sealed sets, as
    `gpumem keep --list` prints them.

    A process can be watched if it was started with GPUMEM_TOP=1 or has called
    gpumem.observe.publish().
    """
    if process is None:
        pages, left_out = _readable()
        try:
            sets = sealed_sets(timeout=1)
        except KeeperError as error:
            sets = []
            left_out.append(str(error))
        _list(pages, sets, as_json)
        for why in left_out:
            click.echo(f"gpumem: {visible(why)}", err=True)
        return
    try:
        page = LivePage.of_process(process)
    except NotPublishedError as error:
        raise click.BadParameter(str(error), param_hint="PID") from None
    if as_json:
        print_json(_facts(page))
    elif once or not page.alive or not stdout().is_interactive:
        console = stdout()
        console.print(view(page, None, console.width))
    else:
        _watch(page, interval)


# --------------------------------------------------------------------------------------- reading


def _watch(page: LivePage, interval: float) -> None:
    """Update the tables until the process ends, or the user presses q or interrupts."""
    before: LivePage | None = None
    console = stdout()
    hint = "q to leave" if sys.stdin.isatty() else "Ctrl-C to leave"
    first = Group(view(page, before, console.width), hint)
    with (
        _keyboard() as wait_for_q,
        Live(first, console=console, screen=True, auto_refresh=False) as live,
    ):
        try:
            while page.alive:
                if wait_for_q(interval):
                    return
                before, page = page, LivePage.of_process(page.process)
                live.update(Group(view(page, before, console.width), hint), refresh=True)
        except NotPublishedError:
            pass  # the process has removed its page
        except KeyboardInterrupt:
            return
    console.print(view(page, before, console.width))
    click.echo(f"gpumem: process {page.process} no longer publishes", err=True)


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    """Read single keys from the terminal; the block receives a function that waits for a q.

    The function waits for at most `seconds`, and returns whether q was pressed. Without a
    terminal as stdin it only waits.
    """
    keyboards = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def wait_for_q(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for keyboard in select.select(keyboards, [], [], left)[0]:
                key = os.read(keyboard, 1)
                if key in (b"q", b"Q"):
                    return True
                if not key:  # the terminal was closed
                    keyboards.clear()
        return False

    if not keyboards:
        yield wait_for_q
        return
    keyboard = keyboards[0]
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield wait_for_q
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _readable() -> tuple[tuple[LivePage, ...], list[str]]:
    """Read all pages; return also a message for each that cannot be read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pages = LivePage.of_all()
    return pages, [str(one.message) for one in caught]


# ------------------------------------------------------------------------------------------ JSON


def _list(pages: tuple[LivePage, ...], sets: list[dict[str, Any]], as_json: bool) -> None:
    nodes = facts_of(node_files())
    if as_json:
        processes = [_facts(page) for page in pages]
        memories = [vars(each) for each in sums_of(pages)]
        found = {"processes": processes, "memories": memories, "sealed_sets": sets}
        print_json(found | nodes)
        return
    console = stdout()
    if pages:
        _print_tables(console, pages)
    elif not nodes["nodes"] and not sets:
        console.print(
            "no process of this user publishes its counters: start one with GPUMEM_TOP=1, "
            "or call gpumem.observe.publish() in it"
        )
    show(console, nodes)
    if sets:
        console.print(table_of_sets(sets))


def _print_tables(console: Console, pages: tuple[LivePage, ...]) -> None:
    rows = table("process", "state", "command", "resources", "in use", "reserved", numbers=3)
    for page in pages:
        rows.add_row(
            str(page.process),
            state_of(page),
            _shortened(command_of(page.process)),
            str(len(page.resources)),
            format_size(page.total("in_use")),
            format_size(page.total("reserved")),
        )
    console.print(rows)
    sums = table("memory", "processes", "in use", "reserved", numbers=3)
    for each in sums_of(pages):
        memory = visible(each.memory)
        held = format_size(each.in_use), format_size(each.reserved)
        sums.add_row(memory, str(each.processes), *held)
    console.print(sums)


def _shortened(text: str) -> str:
    return text if len(text) <= 50 else f"{text[:47]}..."


def _facts(page: LivePage) -> dict[str, Any]:
    return {
        "process": page.process,
        "command": command_of(page.process),
        "state": state_of(page),
        "time": page.time,
        "age_seconds": page.age,
        "period_seconds": page.period,
        "resources": [_resource_facts(one) for one in page.resources],
        "budgets": [vars(one) for one in page.budgets],
        "left_out": page.left_out,
    }


def _resource_facts(one: LiveResource) -> dict[str, Any]:
    facts = {key: value for key, value in vars(one).items() if key != "counters"}
    return facts | dict(one.counters)

"""The tables of ``gpumem top``: resources and budgets of a process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType

from gpumem._support.sizes import format_size
from gpumem._support.texts import visible
from gpumem.cli.output import table
from gpumem.observe import LiveBudget, LivePage, LiveResource

LATE_PERIODS = 10  # without an update, after which the age of the numbers is shown
STATES = {"R": "running", "S": "sleeping", "D": "in a system call", "T": "stopped", "t": "stopped"}
MIN_NAME_WIDTH = 12  # characters; longer names are folded
GAP = 3  # between columns


def view(page: LivePage, before: LivePage | None, width: int) -> RenderableType:
    """Make the tables of a process, with rates since the page `before`."""
    parts: list[RenderableType] = [_title(page), _resource_table(page, before, width)]
    if page.budgets:
        parts.append(_budget_table(page))
    if page.left_out:
        parts.append(f"and {page.left_out} more that do not fit in the page")
    return Group(*parts)


# ----------------------------------------------------------------------------------- the process


def _title(page: LivePage) -> str:
    command = visible(command_of(page.process))
    title = f"process {page.process}, {state_of(page)}" + (f": {command}" if command else "")
    moment = datetime.fromtimestamp(page.time).strftime("%H:%M:%S")
    late = page.age > LATE_PERIODS * max(page.period, 0.1)
    return f"{title}\nat {moment}" + (f", {page.age:.0f} s ago" if late else "")


def command_of(process: int) -> str:
    """Return a process's command line; empty if it is gone, or in another namespace."""
    try:
        words = Path("/proc", str(process), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode("utf-8", "replace") for word in words).strip()


def state_of(page: LivePage) -> str:
    """Return the system's state of a page's process."""
    if not page.alive:
        return "ended"
    try:
        stat = Path("/proc", str(page.process), "stat").read_text(errors="replace")
    except OSError:
        return "unknown"  # its id does not exist in this namespace
    return STATES.get(stat.rpartition(")")[2].split()[0], "unknown")


# ------------------------------------------------------------------------------------- resources


class _Column(NamedTuple):
    title: str
    cell: Callable[[LiveResource], str]
    number: bool = False
    dispensable: int = 0  # on a narrow terminal, the highest are left out first


def _resource_table(page: LivePage, before: LivePage | None, width: int) -> RenderableType:
    """Make a row for each resource, with the columns that are not empty and fit."""
    shown = _fitting(_columns(page, before), page.resources, width)
    rows = table(*(each.title for each in shown), numbers=sum(each.number for each in shown))
    for one in page.resources:
        rows.add_row(*(each.cell(one) for each in shown))
    return rows


def _columns(page: LivePage, before: LivePage | None) -> list[_Column]:
    names: dict[int | None, str] = {one.id: one.name for one in page.resources}
    return [
        _Column("resource", lambda one: one.name),
        _Column("memory", lambda one: one.memory, dispensable=4),
        _Column("kind", lambda one: one.kind, dispensable=7),
        _Column("source", lambda one: names.get(one.source, ""), dispensable=8),
        _Column("in use", _size("in_use"), True),
        _Column("peak", _size("max_in_use"), True, 3),
        _Column("reserved", _size("reserved"), True),
        _Column("peak", _size("max_reserved"), True, 5),
        _Column("asleep", _size_if_any("asleep_bytes"), True, 2),
        _Column("limit", _size_if_any("limit"), True, 2),
        _Column("blocks", _blocks, True, 6),
        _Column("blocks/s", lambda one: _rate(one, page, before), True, 1),
    ]


def _fitting(
    columns: list[_Column], resources: tuple[LiveResource, ...], width: int
) -> list[_Column]:
    """Leave out empty columns, then the dispensable ones until the others fit."""
    widths = {each: max((len(each.cell(one)) for one in resources), default=1) for each in columns}
    shown = [each for each in columns if widths[each]]
    for last in sorted(shown, key=lambda each: each.dispensable, reverse=True):
        need = sum(max(len(each.title), widths[each]) + GAP for each in shown[1:]) + MIN_NAME_WIDTH
        if need <= width or not last.dispensable:
            break
        shown.remove(last)
    return shown


def _size(counter: str) -> Callable[[LiveResource], str]:
    return lambda one: format_size(one.counters[counter])


def _size_if_any(counter: str) -> Callable[[LiveResource], str]:
    return lambda one: format_size(one.counters[counter]) if one.counters[counter] else ""


def _blocks(one: LiveResource) -> str:
    return f"{max(0, one.counters['num_allocs'] - one.counters['num_frees']):,}"


def _rate(one: LiveResource, page: LivePage, before: LivePage | None) -> str:
    """Return the number of allocations per second since the page before."""
    if before is None or page.clock <= before.clock:
        return ""
    earlier = {each.id: each.counters["num_allocs"] for each in before.resources}
    count = one.counters["num_allocs"] - earlier.get(one.id, 0)
    return f"{count / (page.clock - before.clock):,.0f}"


# --------------------------------------------------------------------------------------- budgets


def _budget_table(page: LivePage) -> RenderableType:
    rows = table("budget", "used", "peak", "soft limit", "limit", numbers=4)
    for depth, one in _tree(page.budgets):
        rows.add_row(
            "  " * depth + one.name,
            format_size(one.used),
            format_size(one.peak),
            "" if one.soft is None else format_size(one.soft),
            "" if one.limit is None else format_size(one.limit),
        )
    return rows


def _tree(budgets: tuple[LiveBudget, ...]) -> list[tuple[int, LiveBudget]]:
    """Return the budgets with their depths, each one once, after its parent."""
    known = {one.id for one in budgets}
    children: dict[int | None, list[LiveBudget]] = {}
    for one in reversed(budgets):
        # The parent of a root, or one that does not fit in the page, is None.
        children.setdefault(one.parent if one.parent in known else None, []).append(one)
    found: list[tuple[int, LiveBudget]] = []
    left = [(0, one) for one in children.pop(None, ())]
    while left or children:
        if not left:  # the page is damaged: parents in a circle
            left = [(0, one) for one in children.pop(next(iter(children)))]
        depth, one = left.pop()
        found.append((depth, one))
        left += [(depth + 1, child) for child in children.pop(one.id, ())]
    return found

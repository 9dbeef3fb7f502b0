"""``gpumem peak``: the largest use of memory of a run, in ten lines."""

from __future__ import annotations

from collections.abc import Sequence

import click

from gpumem._support.sizes import format_size, parse_size
from gpumem._support.texts import counted
from gpumem.cli.arguments import complete_trace, memory_option, rule_option, size
from gpumem.cli.output import (
    TOO_MUCH,
    json_option,
    notice,
    pairs,
    print_json,
    progress,
    signed_size,
    stdout,
    without_folders,
)
from gpumem.errors import ConfigError
from gpumem.report import Change, Peak, peak

_STACKS = 5
_GROWN = 3
_FRAMES = 3


@click.command("peak", short_help="Print what the peak of a run consists of.")
@click.argument("file", shell_complete=complete_trace)
@memory_option(
    "--device", "Index of the memory of a FILE that has several; by default the busiest."
)
@rule_option("A group of blocks, by their owner or a frame of their stack; see gpumem report.")
@click.option(
    "--max", "limit", callback=size, metavar="SIZE", help="Exit with 3 if the peak is above SIZE."
)
@click.option(
    "--baseline",
    metavar="FILE",
    shell_complete=complete_trace,
    help="Name the stacks that grew since this FILE; exit with 3 if the peak is above that of the "
    "FILE by more than the tolerance.",
)
@click.option(
    "--tolerance",
    default="0%",
    metavar="PERCENT|SIZE",
    show_default=True,
    help="Of the baseline, such as 2% or 100MiB.",
)
@json_option
def show_peak(
    file: str,
    device: int | None,
    rules: list[tuple[str, str]],
    limit: int | None,
    baseline: str | None,
    tolerance: str,
    as_json: bool,
) -> int:
    """Print the moment of FILE at which most bytes were live, and what they were.

    FILE is a recording, a trace, or a memory snapshot, as for gpumem report. --max and --baseline
    compare live bytes, as requested.
    """
    allowed = [] if limit is None else [limit]
    changes: tuple[Change, ...] = ()
    with progress(f"reading {file}"):
        found = peak(file, device=device, rules=rules)
        if baseline is not None:
            before = peak(baseline, device=device)
            allowed.append(before.live_bytes + _tolerated(tolerance, before.live_bytes))
            changes = before.diff(found)
    over = max((found.live_bytes - each for each in allowed), default=0)
    notice(found.notice)
    if as_json:
        more = {"changes": [each.as_dict() for each in changes]} if baseline else {}
        print_json({**found.as_dict(), "allowed_bytes": min(allowed, default=None), **more})
    else:
        stdout().print(pairs(rows_of(found, changes)))
    if over <= 0:
        return 0
    click.echo(
        f"gpumem: the peak is {format_size(over)} above {format_size(min(allowed))}", err=True
    )
    return TOO_MUCH


def _tolerated(text: str, baseline: int) -> int:
    """Return the bytes that a tolerance allows above the baseline."""
    try:
        if text.endswith("%") and 0 <= (share := float(text[:-1])) < float("inf"):
            return int(baseline * share / 100)
        return parse_size(text)
    except (ValueError, ConfigError):
        raise click.BadParameter(
            f"invalid --tolerance {text!r}: expected a share such as 2%, or a size"
        ) from None


def rows_of(found: Peak, changes: Sequence[Change] = ()) -> dict[str, str]:
    """Return the lines that describe a peak, and the largest growths of a comparison, by names."""
    rows = {
        "peak": f"{format_size(found.live_bytes)} live at {found.time_us / 1e6:.3f} s"
        + (f" in {found.phase}" if found.phase else ""),
        "reserved": "not in the file"
        if found.reserved_bytes is None
        else f"{format_size(found.reserved_bytes)} at its own peak",
    }
    if found.beside:
        rows = {"memory": found.memory, **rows}
    if any(found.beside.values()):
        rows["beside"] = ", ".join(f"{of} {format_size(n)}" for of, n in found.beside.items() if n)
    for by, most in (("category", None), ("rule", None), ("owner", _STACKS)):
        if groups := found.groups.get(by):
            named = (f"{_short(each.name)} {format_size(each.nbytes)}" for each in groups[:most])
            rows[by] = ", ".join(named)
    for number, each in enumerate(found.groups.get("stack", ())[:_STACKS], 1):
        blocks = counted(each.blocks, "block")
        rows[f"stack {number}"] = f"{format_size(each.nbytes)} in {blocks}: {_short(each.name)}"
    for number, change in enumerate([each for each in changes if each.grown > 0][:_GROWN], 1):
        rows[f"grown {number}"] = f"{signed_size(change.grown)} of {_short(change.name)}"
    if found.refused:
        last = found.refused[-1]
        of = f" of {_short(last.owner)}" if last.owner else ""
        limit = f", limit {last.limit_name} {format_size(last.limit)}" if last.limit else ""
        rows["refused"] = f"{len(found.refused):,}, the last {format_size(last.nbytes)}{of}{limit}"
        if last.advice:
            rows["advice"] = last.advice
    return rows


def _short(name: str) -> str:
    return without_folders(" < ".join(name.split(" < ")[:_FRAMES]))

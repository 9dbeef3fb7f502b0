"""``gpumem report``: a recorded run as one page of HTML."""

from __future__ import annotations

from pathlib import Path

import click

from gpumem._support.sizes import format_size
from gpumem._support.texts import counted
from gpumem.cli.arguments import complete_trace, memory_option, rule_option
from gpumem.cli.output import (
    json_option,
    notice,
    pairs,
    print_json,
    progress,
    signed_size,
    stdout,
    table,
    without_folders,
)
from gpumem.report import Change, Report, write_report

_CHANGES = 10  # the maximum of those that grew, and of those that shrank


@click.command(short_help="Make a page of recordings, traces or memory snapshots.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, shell_complete=complete_trace)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write; by default the first FILE's name with .html in the current folder.",
)
@click.option("--title", help="Heading of the page.")
@memory_option(
    "--device", "Index of the only memory to show of a FILE that has several; by default all."
)
@rule_option(
    "A group that the page shows first: blocks with REGEX in their owner or in a frame of their "
    'stack, "file:line function"; of several, the first that fits.'
)
@click.option(
    "--diff",
    is_flag=True,
    help="Print which call stacks, or owners in files without stacks, have more or fewer bytes at "
    "the peak of the second FILE than at that of the first.",
)
@json_option
def report(
    files: tuple[str, ...],
    output: Path | None,
    title: str | None,
    device: int | None,
    rules: list[tuple[str, str]],
    diff: bool,
    as_json: bool,
) -> None:
    """Write a page that shows FILE: bytes over time, addresses, stacks, owners, leaks, policies.

    FILE is a recording or a snapshot (JSON) of gpumem.observe, a trace (.npz), a PyTorch memory
    snapshot, an RMM log, or the name of a bundled trace. Several, such as the ranks of a job or a
    program before and after a change, are shown on one page and compared there. The page is one
    file, which every browser can open without a network.
    """
    if diff and len(files) != 2:
        raise click.UsageError(f"--diff compares 2 files, not {len(files)}")
    page = Path(f"{Path(files[0]).stem}.html") if output is None else output
    source = files[0] if len(files) == 1 else files
    try:
        with progress(f"reading {files[0]}") as doing:
            made = write_report(source, page, title=title, device=device, rules=rules, doing=doing)
    except OSError as error:
        raise click.ClickException(f"{page}: cannot be written: {error.strerror}") from None
    notice(made.notice)
    if as_json:
        print_json(made.as_dict())
    elif diff:
        _show_changes(made)
    else:
        _show(made)


def _show(made: Report) -> None:
    console = stdout()
    if len(made.runs) > 1:
        console.print(
            f"{len(made.runs)} runs are on the page; the figures are those of {made.name}"
        )
    console.print(
        pairs(
            {
                "page": f"{made.path}, {format_size(made.nbytes)}",
                "events": f"{made.events:,}, {counted(made.allocations, 'allocation')}",
                "peak live": format_size(made.peak_live_bytes),
                "live at the end": f"{format_size(made.live_at_end_bytes)} in "
                f"{counted(made.live_at_end_blocks, 'block')}",
                "refused": f"{made.failed_allocs:,}",
            }
        )
    )
    rows = table("", "reserved", "/ live", "", numbers=3)
    for each in made.policies:
        rows.add_row(
            each["name"],
            format_size(each["peak_reserved_bytes"]),
            f"{each['fragmentation']:.3f}",
            each["how"],
        )
    console.print(rows)


def _show_changes(made: Report) -> None:
    before, after = made.compared
    rows = table("at the peaks", before.name, after.name, "grown", numbers=3)
    peaks = Change("all", before.peak_live_bytes, after.peak_live_bytes)
    left_out = made.changes[_CHANGES:-_CHANGES]
    for each in (peaks, *(change for change in made.changes if change not in left_out)):
        name = without_folders(each.name)
        rows.add_row(
            name, format_size(each.before), format_size(each.after), signed_size(each.grown)
        )
    stdout().print(rows)
    if left_out:
        stdout().print(f"{counted(len(left_out), 'smaller change')} not shown; --json has all")
    if peaks.grown and not made.changes:
        notice("the files have neither stacks nor owners to compare, which would say what grew")

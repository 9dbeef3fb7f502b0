"""Reports: one page of HTML that shows what recorded runs did with memory.

The page is one file that needs no network. It draws every block one by one, from packed
columns, so that its filters and its zoom are exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from gpumem._snapshots.snapshot import Snapshot
from gpumem._support.arguments import is_same_file, require
from gpumem._support.files import require_writable
from gpumem._support.notebooks import html_table
from gpumem._support.sizes import format_size
from gpumem._support.texts import counted
from gpumem.errors import ConfigError, TraceError
from gpumem.replay.policies import Policy
from gpumem.report import page
from gpumem.report.data import Figures, notice_of_runs, policies_of, run_data
from gpumem.report.peak import Change, Peak, Source, peak, peak_of, traces_of_source
from gpumem.traces import Trace
from gpumem.traces.formats import busiest, memory_of
from gpumem.traces.groups import Rules, expressions_of

__all__ = ["Change", "Peak", "Report", "peak", "write_report"]
__dir__ = __all__.copy

MAX_CHANGES = 200
"""Maximum number of stacks that grew on a page, and of those that shrank."""


@dataclass(frozen=True, repr=False)
class Report(Figures):
    """A page that was written, with the main figures of the run that it shows.

    Attributes
    ----------
    path : Path
        The page.
    nbytes : int
        Size of the page.
    policies : tuple of dict
        The memory that each policy reserved or would have reserved: ``name``, ``how``
        ("recorded", "at least", "replayed" or "modelled"), ``peak_reserved_bytes`` and
        ``fragmentation``, which is reserved divided by live bytes.
    notice : str
        Facts that the files lack, such as lost events or blocks from before the first one, of all
        runs; "" if they lack none.
    runs : tuple of Figures
        Of every run on the page, in order: each file, and each memory in a file.
    changes : tuple of Change
        Of two or more files, what has more or fewer bytes at the peak of the second than at that of
        the first; see `Peak.diff`.
    compared : tuple of Figures
        The two runs that `changes` compares: the busiest memory of either file.
    name : str
        Name of the run that the page shows first: the busiest memory of the first file. This and
        all other fields are those of `Figures`; `policies` are of the same run.

    Examples
    --------
    >>> import os, tempfile, gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> report = arena.report(os.path.join(tempfile.mkdtemp(), "now.html"))
    >>> report.live_at_end_bytes, report.nbytes == report.path.stat().st_size
    (1000, True)
    """

    path: Path
    nbytes: int
    policies: tuple[dict[str, Any], ...]
    notice: str = ""
    runs: tuple[Figures, ...] = ()
    changes: tuple[Change, ...] = ()
    compared: tuple[Figures, ...] = ()

    def __repr__(self) -> str:
        return f"<gpumem.report.Report {str(self.path)!r}: {self._summary()}>"

    def _summary(self) -> str:
        lost = ""
        if self.lost_events:
            lost = f"; {self.lost_events:,} lost, perhaps with a higher peak"
        return (
            f"{counted(self.events, 'event')}, at most "
            f"{format_size(self.peak_live_bytes)} live at once, "
            f"{format_size(self.live_at_end_bytes)} live at the end{lost}"
        )

    def _repr_html_(self) -> str:
        rows = {"page": str(self.path), "run": self.name, "memory": self._summary()}
        if len(self.runs) > 1:
            rows["runs on the page"] = str(len(self.runs))
        for each in self.policies:
            rows[f"reserved, {each['name']}"] = format_size(each["peak_reserved_bytes"])
        return html_table("gpumem.report.Report", rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        changes = [each.as_dict() for each in self.changes]
        return {**asdict(self), "path": str(self.path), "changes": changes}


def write_report(
    source: Source | Sequence[Source],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    device: int | None = None,
    rules: Rules = (),
    doing: Callable[[str], None] = lambda what: None,
) -> Report:
    """Write a page that shows what a run did with memory, or several runs side by side.

    It shows bytes over time by owner, addresses, the state at each moment, stacks, streams, sizes,
    and what is live at the end; docs/where_memory_goes.md describes the views. It also shows what
    four policies would have reserved, from replays on the host and from models. If the source has
    no addresses, the page shows those of a replay.

    Parameters
    ----------
    source : Trace, Snapshot, str or path, or a sequence of them
        A trace; a snapshot; or a file that `gpumem.traces.load_traces` reads: a recording of
        `gpumem.observe.record`, a trace, a snapshot of gpumem or PyTorch, an RMM log. Each memory
        in a file is a run of its own. Several sources, such as the ranks of a job, or a program
        before and after a change, are on one page and can be compared there.
    path : str or path
        The page. It is written whole or not at all, and replaces an existing file.
    title : str, optional
        Heading of the page; by default the source's name.
    device : int, optional
        Index of the only device to show of sources that have several; by default all. A trace has
        one, number 0.
    rules : sequence of (str, str), optional
        Name and regular expression of each of the groups that the page shows at first. A block is
        in the first group with an expression that is found in its owner or in a frame of its
        stack, ``file:line function``.
    doing : callable, optional
        Called with a description of each step, for progress messages.

    Returns
    -------
    Report

    Raises
    ------
    TraceError
        A source cannot be read, has no such `device`, there is none, or more is live at once than
        a replay can place.
    InUseError
        Every resource of the process is being recorded, so a replay cannot be recorded.
    OSError
        The page cannot be written: `path` is a folder or empty, or its folder is missing or
        read-only, which is checked before a source is read; or the disk is full.
    ConfigError
        The page is a source, or a rule is not a regular expression.
    TypeError
        An argument of another type.

    Examples
    --------
    >>> import os, tempfile
    >>> from gpumem.observe import write_report
    >>> page = os.path.join(tempfile.mkdtemp(), "report.html")
    >>> report = write_report("multistream_train", page)
    >>> report.streams, report.policies[0]["name"]
    (3, 'gpumem, pages that move')
    >>> both = write_report(["gpt2_varlen_train", "multistream_train"], page)
    >>> [run.name for run in both.runs]
    ['gpt2_varlen_train', 'multistream_train']
    """
    require("title", title, (str, type(None)), "a str or None")
    expressions_of(rules)
    target = Path(path)
    alone = isinstance(source, Trace | Snapshot | str | os.PathLike)
    sources = [cast("Source", source)] if alone else list(cast("Sequence[Source]", source))
    if not sources:
        raise TraceError("a report needs at least one source")
    if is_same_file(target, sources):
        raise ConfigError(f"invalid path = {str(path)!r}: expected another file than a source")
    require_writable(target)
    found = []
    for each in sources:
        doing(f"reading {getattr(each, 'name', each)}")
        found.append(traces_of_source(each, device))
    first = busiest(found[0])
    names = _names_of(sources, found)
    runs = [
        (trace, label)
        for traces, name in zip(found, names, strict=True)
        for trace, label in _labelled(traces, name)
    ]
    data: list[dict[str, Any]] = []
    served: list[Policy] = []
    file_of = {id(trace): number for number, traces in enumerate(found) for trace in traces}
    for trace, label in runs:
        ways = list(policies_of(trace, doing))
        data.append({**run_data(trace, ways, label, rules), "file": file_of[id(trace)]})
        if trace is first:
            served = ways
    doing("writing the page")
    shown = next(n for n, (trace, _) in enumerate(runs) if trace is first)
    peaks = [peak_of(busiest(traces)) for traces in found[:2]]
    changes = peaks[0].diff(peaks[1]) if peaks[1:] else ()
    facts = {
        "runs": data,
        "shown": shown,
        "names": names,
        "changes": [*changes[:MAX_CHANGES], *changes[MAX_CHANGES:][-MAX_CHANGES:]],
    }
    written = page.write_page(target, title or _title(first, names), facts)
    figures = {
        id(trace): Figures(**each["figures"] | ({"name": each["label"]} if data[1:] else {}))
        for (trace, _), each in zip(runs, data, strict=True)
    }
    return Report(
        path=target,
        nbytes=written,
        policies=tuple(each.as_dict() for each in served),
        notice=notice_of_runs(*zip(*runs, strict=True)),
        runs=tuple(figures.values()),
        changes=changes,
        compared=tuple(figures[id(busiest(traces))] for traces in found[:2]) if peaks[1:] else (),
        **vars(figures[id(first)]),
    )


def _names_of(sources: Sequence[Source], found: Sequence[Sequence[Trace]]) -> list[str]:
    """Name each source of several: files by as much of their paths as tells them apart."""
    if len(sources) == 1:
        return [""]
    parts = [
        Path(source).absolute().with_suffix("").parts
        if isinstance(source, str | os.PathLike)
        else (traces[0].name,)
        for source, traces in zip(sources, found, strict=True)
    ]
    names: list[str] = []
    for count in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _labelled(traces: Sequence[Trace], name: str) -> Iterator[tuple[Trace, str]]:
    """Name the traces of one file; `name` is empty if it is the only one."""
    for trace in traces:
        memory = memory_of(trace)
        parts = [
            name if name or memory else trace.name,
            memory if not name or len(traces) > 1 else "",
        ]
        yield trace, ", ".join(filter(None, parts))


def _title(first: Trace, names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names) or first.name or "memory"
    return f"{names[0]} and {len(names) - 1} more"

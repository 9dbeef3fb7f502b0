"""The peak of a run: what was live when most was live, and how two peaks differ."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from gpumem._events.refusals import RefusedRequest
from gpumem._snapshots.snapshot import Snapshot
from gpumem._support.arguments import require
from gpumem._support.notebooks import html_table
from gpumem._support.sizes import format_size
from gpumem.errors import TraceError
from gpumem.report.data import notice_of, recorded_policy, refusals_of
from gpumem.traces import Trace, load_traces
from gpumem.traces.builder import require_device
from gpumem.traces.formats import busiest, memory_of
from gpumem.traces.gpumem_snapshot import traces_of_snapshot
from gpumem.traces.groups import Rules, bytes_at, groups_of, peak_event, phase_at

__all__ = ["Change", "Group", "Peak", "peak"]

Source: TypeAlias = Trace | Snapshot | str | os.PathLike[str]
"""A run that reports and peaks are made of."""
_SITES = ("stack", "owner")
"""The blocks of two runs are compared by the first of these that both have."""


class Group(NamedTuple):
    """Blocks that are live at a peak."""

    name: str
    nbytes: int
    blocks: int


class Change(NamedTuple):
    """Bytes of one site at two peaks; `grown` is negative if there are fewer in the second.

    Examples
    --------
    >>> from gpumem.observe import Change
    >>> Change("forward (model.py:7)", 100, 150).grown
    50
    """

    name: str
    before: int
    after: int

    @property
    def grown(self) -> int:
        """Bytes more in the second."""
        return self.after - self.before

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the growth as a plain dict."""
        return {**self._asdict(), "grown": self.grown}


@dataclass(frozen=True, repr=False)
class Peak:
    """The moment at which most bytes were live; made by `peak`.

    Attributes
    ----------
    name : str
        Name of the run.
    memory : str
        Such as "cuda:0"; "" if the file does not name it.
    live_bytes : int
        As requested.
    reserved_bytes : int or None
        Peak of the bytes reserved from the driver; None if the file lacks them.
    time_us : int
        Microseconds since the recording began.
    phase : str
        The innermost phase, behind those around it; "" if the run has none.
    groups : mapping of str to tuple of Group
        The live blocks by each grouping that the run has: "category", "owner", "stack" and "rule".
        Each has all blocks, the largest group first.
    refused : tuple of RefusedRequest
        Each refused request.
    notice : str
        Facts that the file lacks.
    beside : mapping of str to int
        Live bytes of each other memory of the file at that time, such as those of the host that
        `offload` uses.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> with gpumem.observe.record(arena) as recording, gpumem.observe.tag("weights"):
    ...     buffer = arena.allocate(1000)
    >>> found = gpumem.observe.peak(recording.trace())
    >>> found.live_bytes, found.groups["owner"][0].name
    (1000, 'weights')
    """

    name: str
    memory: str
    live_bytes: int
    reserved_bytes: int | None
    time_us: int
    phase: str
    groups: Mapping[str, tuple[Group, ...]]
    refused: tuple[RefusedRequest, ...]
    notice: str
    beside: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        during = f" in {self.phase}" if self.phase else ""
        return f"<gpumem.observe.Peak of {self.name}: {format_size(self.live_bytes)}{during}>"

    def _repr_html_(self) -> str:
        largest = next(iter(self.groups.values()), ())[:10]
        rows = {"live": format_size(self.live_bytes), "phase": self.phase}
        return html_table(
            f"gpumem.observe.Peak of {self.name}",
            rows | {each.name: format_size(each.nbytes) for each in largest},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        groups = {by: [each._asdict() for each in found] for by, found in self.groups.items()}
        refused = [each._asdict() for each in self.refused]
        return {**asdict(self), "groups": groups, "refused": refused}

    def diff(self, later: Peak) -> tuple[Change, ...]:
        """Compare the peak of this run with that of another one, by call stack.

        Parameters
        ----------
        later : Peak

        Returns
        -------
        tuple of Change
            Of every call stack, or of every owner if a run lacks stacks, that has more or fewer
            bytes in `later`; those with the largest growth first, those that shrank last. Stacks
            of one run alone that differ only in line numbers are one, and named without them: an
            edit of a program moves its lines.
        """
        require("later", later, Peak, "a Peak")
        by = next((each for each in _SITES if each in self.groups and each in later.groups), "")
        groups = [peak.groups.get(by, ()) for peak in (self, later)]
        before, after = ({each.name for each in found} for found in groups)
        moved = {*map(_without_lines, before - after)} & {*map(_without_lines, after - before)}
        sums: dict[str, list[int]] = {}
        for number, found in enumerate(groups):
            for name, nbytes, _ in found:
                place = _without_lines(name)
                site = place if place in moved and name not in before & after else name
                sums.setdefault(site, [0, 0])[number] += nbytes
        changes = (Change(name, *both) for name, both in sums.items())
        return tuple(sorted((each for each in changes if each.grown), key=lambda c: -c.grown))


def _without_lines(name: str) -> str:
    return re.sub(r":\d+\)", ")", name)


def peak(source: Source, *, device: int | None = None, rules: Rules = ()) -> Peak:
    """Return the moment of a run at which most bytes were live.

    Parameters
    ----------
    source : Trace, Snapshot, str or path
        As `write_report` takes them. Of a file with several memories, the busiest counts.
    device : int, optional
        Index of the memory of a file that has several.
    rules : sequence of (str, str), optional
        Name and regular expression of each group of ``groups["rule"]``.

    Raises
    ------
    TraceError
        The source cannot be read, or has no such `device`.
    ConfigError
        A rule is not a regular expression.

    Examples
    --------
    >>> import gpumem.observe
    >>> found = gpumem.observe.peak("multistream_train")
    >>> found.live_bytes
    3455561800
    """
    traces = traces_of_source(source, device)
    shown = busiest(traces)
    return peak_of(shown, rules, [each for each in traces if each is not shown])


def traces_of_source(source: Source, device: int | None) -> list[Trace]:
    """Return a trace of each memory of a source."""
    if isinstance(source, Trace):
        try:
            require_device(device, 1)
        except TraceError as error:
            raise TraceError(f"{source.name or 'a trace'}: {error}") from None
        return [source]
    if isinstance(source, Snapshot):
        return traces_of_snapshot(source, "snapshot", device)
    return load_traces(source, device=device)


def peak_of(trace: Trace, rules: Rules = (), others: Sequence[Trace] = ()) -> Peak:
    """Return the peak of a trace; `others` are of other memories at the same time."""
    at = peak_event(trace)
    held = recorded_policy(trace)
    groups = {}
    for by in ("category", "owner", "stack", *(["rule"] if rules else [])):
        if (found := groups_of(trace, by, rules)) is not None:
            groups[by] = tuple(Group(*row) for row in bytes_at(trace, at, found))
    return Peak(
        name=trace.name,
        memory=memory_of(trace),
        live_bytes=trace.peak_requested,
        reserved_bytes=None if held is None else held.held.peak,
        time_us=int(trace.time_us[at]) if trace.events else 0,
        phase=phase_at(trace, at),
        groups=groups,
        refused=tuple(each for _, each in refusals_of(trace)),
        notice=notice_of(trace),
        beside=_live_beside(trace, at, others),
    )


def _live_beside(trace: Trace, at: int, others: Sequence[Trace]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in others if trace.events else ():
        offset = trace.meta.get("first_us", 0) - each.meta.get("first_us", 0)
        until = each.time_us.searchsorted(trace.time_us[at] + offset, side="right")
        memory = memory_of(each)
        found[memory] = found.get(memory, 0) + int(each.live_bytes()[until - 1] if until else 0)
    return found

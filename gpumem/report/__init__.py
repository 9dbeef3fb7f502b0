"""Reports: one page of HTML that shows what a recorded run did with memory.

The page is one file that needs no network. It draws every block one by one, from packed
columns, so that its filters and its zoom are exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumem._support.notebooks import html_table
from gpumem._support.sizes import format_size
from gpumem.observe import Snapshot
from gpumem.replay.policies import policies
from gpumem.report import page
from gpumem.report.blocks import blocks_of
from gpumem.report.data import Figures, figures_of, notice_of, page_data, recorded_policy
from gpumem.traces import Trace, load_trace
from gpumem.traces.gpumem_snapshot import trace_of_snapshot

__all__ = ["Figures", "Report", "write_report"]


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
        What the page lacks because the recording lost events; "" if it lost none.
    name : str
        Name of the run. This and all other fields are those of `Figures`.

    Examples
    --------
    >>> import os, tempfile, gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> report = arena.report(os.path.join(tempfile.mkdtemp(), "now.html"))
    >>> report.never_freed_bytes, report.nbytes == report.path.stat().st_size
    (1000, True)
    """

    path: Path
    nbytes: int
    policies: tuple[dict[str, Any], ...]
    notice: str = ""

    def __repr__(self) -> str:
        return f"<gpumem.report.Report {str(self.path)!r}: {self._summary()}>"

    def _summary(self) -> str:
        return (
            f"{self.events:,} event{'s' * (self.events != 1)}, at most "
            f"{format_size(self.peak_live_bytes)} live at once, "
            f"{format_size(self.never_freed_bytes)} live at the end"
        )

    def _repr_html_(self) -> str:
        rows = {"page": str(self.path), "run": self.name, "memory": self._summary()}
        for each in self.policies:
            rows[f"reserved, {each['name']}"] = format_size(each["peak_reserved_bytes"])
        return html_table("gpumem.report.Report", rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        return {**asdict(self), "path": str(self.path)}


def write_report(
    source: Trace | Snapshot | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    device: int | None = None,
    doing: Callable[[str], None] = lambda what: None,
) -> Report:
    """Write a page that shows a run: bytes over time, addresses, streams, sizes, owners, leaks.

    It also shows what four policies would have reserved, from replays on the host and from models.
    If the source has no addresses, the page shows those of a replay.

    Parameters
    ----------
    source : Trace, Snapshot, str or path
        A trace; a snapshot, of which the page shows the memory with the most bytes in use; or a
        file that `gpumem.traces.load_trace` reads: a recording of `gpumem.observe.record`, a trace,
        a snapshot of gpumem or PyTorch, an RMM log.
    path : str or path
        The page. It is written whole or not at all, and replaces an existing file.
    title : str, optional
        Heading of the page; by default the source's name.
    device : int, optional
        Index of the device if a file has several; by default the busiest.
    doing : callable, optional
        Called with a description of each step, for progress messages.

    Returns
    -------
    Report

    Raises
    ------
    TraceError
        The source cannot be read, or more is live at once than a replay can place.
    InUseError
        Every resource of the process is being recorded, so a replay cannot be recorded.
    OSError
        The page cannot be written.

    Examples
    --------
    >>> import os, tempfile
    >>> page = os.path.join(tempfile.mkdtemp(), "report.html")
    >>> report = write_report("multistream_train", page)
    >>> report.streams, report.policies[0]["name"]
    (3, 'gpumem, pages that move')
    """
    import gpumem

    if isinstance(source, Snapshot):
        source = trace_of_snapshot(source.as_dict(), "snapshot")
    doing(f"reading {getattr(source, 'name', source)}")
    trace = source if isinstance(source, Trace) else load_trace(source, device=device)
    recorded = recorded_policy(trace)
    served = [recorded] if recorded else []
    for each in policies(trace):
        served.append(each)
        doing(f"{each.name}: done")
    doing("writing the page")
    text = page.page(title or trace.name or "memory", gpumem.__version__, page_data(trace, served))
    # A title is often a file's name, which need not be UTF-8.
    written = _write_whole(Path(path), text.encode("utf-8", "replace"))
    return Report(
        path=Path(path),
        nbytes=written,
        policies=tuple(each.as_dict() for each in served),
        notice=notice_of(trace),
        **vars(figures_of(trace, blocks_of(trace))),
    )


def _write_whole(path: Path, data: bytes) -> int:
    """Write a file under another name first, so that a reader never finds half of it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return len(data)

"""A page that the processes of a job write together, each when it ends.

The page itself holds the runs of those that have ended, so no other file is needed, and the last
one writes the whole page, whether or not it is the process that started the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpumem._support.files import is_at
from gpumem.report import page, processes
from gpumem.report.data import policies_of, run_data
from gpumem.traces import Trace


def add_runs(
    traces: Sequence[Trace], path: Path, *, job: str, label: str, problem: str = ""
) -> dict[str, str]:
    """Add the memories of one process, which ends now, to the page of its job.

    The first process of a job that has a memory replaces the page, if there is one.

    Parameters
    ----------
    traces : sequence of Trace
        One for each memory; none if nothing was allocated.
    path : Path
        The page.
    job : str
        The same for all processes of the job, and for no other.
    label : str
        Name of the process on the page.
    problem : str, optional
        Reason why the process has no traces, though it may have allocated.

    Returns
    -------
    dict of str to str
        The processes of the job that the page lacks, and why.

    Raises
    ------
    TraceError
        More is live at once than a replay can place.
    OSError
        The page cannot be written.
    """
    stopped_us = time.time_ns() // 1000
    added = []
    for trace in traces:
        memory = f", {trace.meta.get('memory')}" if len(traces) > 1 else ""
        run = run_data(trace, list(policies_of(trace, lambda _: None)), label + memory)
        run["meta"]["stopped_us"] = stopped_us
        added.append(run)
    with _locked(path.with_name(f"{path.name}.lock")):
        facts = page.facts_of(path)
        if facts.get("job") != job:
            facts = {}
        runs: list[dict[str, Any]] = facts.get("runs", []) + added
        processes.note(job, processes.ENDED, problem)
        missing: dict[str, str] = facts.get("missing", {}) | processes.missing_of(job)
        processes.forget(job)
        if not runs or (not added and missing == facts.get("missing")):
            return missing
        runs.sort(key=lambda run: (len(run["label"]), run["label"]))  # rank 2 before rank 10
        shown = max(range(len(runs)), key=lambda n: runs[n]["figures"]["peak_live_bytes"])
        facts = {"runs": runs, "shown": shown, "job": job, "missing": missing}
        page.write_page(path, path.stem, facts)
        return missing


def job_of(path: Path) -> str | None:
    """Return the job that has written a page, if there is one."""
    job = page.facts_of(path).get("job")
    return job if isinstance(job, str) else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which the holder removes."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(descriptor, path):  # an earlier holder may have removed it
                try:
                    yield
                finally:
                    path.unlink()
                return
        finally:
            os.close(descriptor)  # ends the lock

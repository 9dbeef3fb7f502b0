"""The processes of a job that have memory to show and are not on its page yet.

Each appends a line to a file in shared memory when it makes its first resource, and another one
when it has added itself to the page. A process that was killed lacks the second line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path("/dev/shm")
BEGUN, ENDED = "begun", "ended"
LOST = "it was killed, or replaced its program by another one (os.exec)"


def file_of(job: str) -> Path:
    """Return the file of a job, which begins with the id of its first process."""
    return FOLDER / f"gpumem-run-{os.getuid()}-{job.replace(' ', '-')}"


def note(job: str, what: str, problem: str = "") -> None:
    """Note that this process has `BEGUN`, or has `ENDED`, perhaps with a problem."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    flags |= os.O_CREAT if what == BEGUN else 0
    line = f"{os.getpid()} {_start_of(os.getpid())} {what} {' '.join(problem.split())}\n"
    # Without the file, no lost process is known.
    with (
        contextlib.suppress(OSError),
        open(os.open(file_of(job), flags, 0o600), "ab", buffering=0) as file,
    ):
        file.write(line.encode())


def missing_of(job: str) -> dict[str, str]:
    """Return the processes that have ended without adding themselves, and why."""
    try:
        lines = [line.split(" ", 3) for line in file_of(job).read_text().splitlines()]
    except OSError:
        return {}
    ends = {(pid, start): problem for pid, start, what, problem in lines if what == ENDED}
    missing = {}
    for pid, start, _, _ in lines:
        why = ends.get((pid, start), LOST if _start_of(pid) != start else "")
        if why:
            missing[f"process {pid}"] = why
    return missing


def text_of(missing: Mapping[str, str]) -> str:
    """Describe the processes that a page lacks; "" if it lacks none."""
    each = "; ".join(f"{label}: {why}" for label, why in missing.items())
    count = len(missing)
    return f"{count} process{'es are' if count > 1 else ' is'} missing: {each}" if count else ""


def forget(job: str) -> None:
    """Remove the file, once the first process of the job ends or has ended."""
    first = int(job.split()[0])
    if first == os.getpid() or not _start_of(first):
        file_of(job).unlink(missing_ok=True)


def _start_of(process: int | str) -> str:
    """Return when a process began, in the kernel's ticks; "" if it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]

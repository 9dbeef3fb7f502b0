"""The steps after the imports of PyTorch and gpumem in a process of `gpumem run`, or a child.

`VARIABLE` of the environment holds the options, as JSON; children inherit it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple, Self

from gpumem import observe
from gpumem.config import ArenaConfig
from gpumem.device import Device
from gpumem.errors import GpumemError, TraceError
from gpumem.integrations import torch
from gpumem.integrations._common.resources import Resources

VARIABLE = "GPUMEM_RUN"
FOLDER = Path(__file__).with_name("startup")
"""The first folder of PYTHONPATH, so that Python runs its module at the start."""

EVENTS = 1 << 20  # of a report; 48 MiB


class Options(NamedTuple):
    """The options of `gpumem run`.

    Attributes
    ----------
    process : int
        Id of the process that the command became.
    max_mem : int
        Bytes that the arena of each GPU may hold in each process; 0 is unlimited.
    report : str
        The page to which each process adds its run at exit; empty: none.
    stacks : float
        Share of the allocations that are recorded with a stack, 0 to 1.
    began : int
        Time at which it began, in nanoseconds since 1970.
    """

    process: int
    max_mem: int
    report: str
    stacks: float
    began: int

    @classmethod
    def of_environment(cls) -> Self:
        """Read the options."""
        return cls(*json.loads(os.environ[VARIABLE]))

    def text(self) -> str:
        """Return the options as the variable holds them."""
        return json.dumps(self)

    def job(self) -> str:
        """Return a name for this run of the command, which no other run has."""
        return f"{self.process} {self.began}"


def begin() -> None:
    """Enable gpumem for PyTorch, before the program has used either.

    A failure is reported in one line. The program then runs with PyTorch's own allocator, and a
    page shows the arenas that the program makes itself.
    """
    options = Options.of_environment()
    try:
        config = ArenaConfig(max_mem=options.max_mem)
        resources = Resources("PyTorch", config=config)
        torch._switch.enable(torch.setting_of(resources, "full"))
    except GpumemError as error:
        _report(f"not enabled for PyTorch: {error}")


_recording: observe.Recording | None = None
"""The recording of this process. A fork's child begins its own, without its parent's events."""


def record() -> None:
    """Record everything that is allocated through gpumem; as Python ends, add it to the page."""
    # A page is made with the host device, and its workers stop at exit. That is registered here,
    # so that it happens after the page.
    Device("host")._open()
    # The module that writes the page is imported now: named tuples and data classes that are made
    # at exit let Python forget that Ctrl-C ended the program, and change its exit status.
    importlib.import_module("gpumem.report.joined")
    options = Options.of_environment()
    _begin_recording(options)
    os.register_at_fork(after_in_child=lambda: _begin_recording(options))
    atexit.register(_write, options)


def _begin_recording(options: Options) -> None:
    global _recording
    _recording = None
    _recording = observe.record(capacity=EVENTS, stacks=options.stacks)


def _write(options: Options) -> None:
    from gpumem.report import joined

    page = Path(options.report)
    started = os.getpid() == options.process  # mostly the last one to end
    recording = _recording
    if recording is None:  # of a child that had no host memory for one
        return
    try:
        recording.stop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of events that a ring has lost: the page says so
            joined.add_runs(recording._traces(None), page, job=options.job(), label=_label())
    except TraceError:
        # A launcher and its helpers have PyTorch enabled and allocate nothing: that is no news.
        if started and joined.job_of(page) != options.job():
            if not torch.status().enabled:
                _report(
                    f"{page}: not written: no block was allocated through gpumem; without a "
                    "GPU, a page shows the arenas that the program makes itself"
                )
            return
    except OSError as error:
        _report(f"{page}: cannot be written: {error.strerror}")
        return
    if started:
        _report(f"wrote {page}")


def _label() -> str:
    """Name this process on the page."""
    rank = os.environ.get("RANK", "")
    return f"rank {rank}" if rank.isdigit() else f"process {os.getpid()}"


def _report(text: str) -> None:
    print(f"gpumem: {' '.join(text.split())}", file=sys.stderr)

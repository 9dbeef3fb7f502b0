"""The steps after the imports of PyTorch and gpumem in a process of `gpumem run`, or a child.

`VARIABLE` of the environment holds the options, as JSON; children inherit it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from gpumem import observe
from gpumem._budget import Budget
from gpumem._events.recorder import call_with_first_resource
from gpumem.device import Device
from gpumem.errors import GpumemError, TraceError
from gpumem.integrations import torch
from gpumem.integrations._common.resources import Resources
from gpumem.integrations.torch import _pinned
from gpumem.integrations.torch._offload import begin_at_first_call
from gpumem.report import joined, processes
from gpumem.traces import Trace

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
    max_mem : int or str
        Bytes that the arena of each GPU may hold in each process, or the share of the GPU's memory;
        0 is unlimited.
    report : str
        The page to which each process adds its run at exit; empty: none.
    stacks : float
        Share of the allocations that are recorded with a stack, 0 to 1.
    began : int
        Time at which it began, in nanoseconds since 1970.
    pinned : int, str or None
        Bytes that the arena of pinned memory may hold in each process, which alone is PyTorch's, or
        the share of the host's memory; 0 is unlimited. None: gpumem serves the GPU's memory, too.
    offload : int, str or None
        Bytes that a GPU may hold before saved tensors move to the host, or the share of its memory;
        0 is as many as it has. None: none move.
    node : str or None
        Name of the node's budget that this memory is charged to.
    """

    process: int
    max_mem: int | str
    report: str
    stacks: float
    began: int
    pinned: int | str | None = None
    offload: int | str | None = None
    node: str | None = None

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
        resources = Resources("PyTorch", config={"max_mem": options.max_mem}, node=options.node)
        if options.report:
            torch.record_phases()
        if options.pinned is None:
            torch._switch.enable(torch.setting_of(resources, "full"))
            if options.node is not None:
                _keep_figures_within(options.node)
        else:
            _pinned.node = options.node
            torch.enable_pinned(limit=options.pinned or None)
        if options.offload is not None:
            _offload_later(options.offload)
    except GpumemError as error:
        _report(f"not enabled for PyTorch: {error}")


def _keep_figures_within(node: str) -> None:
    """Let PyTorch's figures of a GPU be at most the budget's: programs size themselves by them."""
    cuda = torch.import_torch().cuda
    of_driver = cuda.mem_get_info

    @functools.wraps(of_driver)
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        budget = Budget(None, node=node)
        left, limit = budget.free, budget.limit
        free, total = of_driver(device)  # after a wait for another process
        return (
            free if left is None else min(free, left),
            total if limit is None else min(total, limit),
        )

    cuda.mem_get_info = cuda.memory.mem_get_info = mem_get_info


def _offload_later(limit: int | str) -> None:
    """Let saved tensors move from the first training call of a module on a GPU on.

    The program may choose its GPU before, or fork. The report of each GPU is printed as the process
    ends.
    """
    contexts: list[torch.Offload] = []

    def begin() -> torch.Offload | None:
        try:
            made = torch.offload(limit or None)
        except GpumemError as error:
            _report(f"nothing is offloaded: {error}")
            return None
        if not contexts:
            atexit.register(tell)
        if made not in contexts:
            contexts.append(made)
        return made

    def tell() -> None:
        totals: dict[str, torch.OffloadReport] = {}
        for each in contexts:
            total = totals.setdefault(f"offload on {each._mover.device}", torch.OffloadReport())
            report = each.report()
            total._add(report)
            total.wait_seconds += report.wait_seconds
        for name, total in totals.items():
            _report(f"{name if len(totals) > 1 else 'offload'}: {total}")

    begin_at_first_call(torch.import_torch(), begin)


_recording: observe.Recording | None = None
"""The recording of this process. A fork's child begins its own, without its parent's events."""
_problem = ""
"""Reason why there is none."""
_options: Options | None = None
"""The options of a run that writes a page."""
_state = "running"
"""Whether this process is "running", is "ending", by adding itself to the page, or has "ended"."""


def record() -> None:
    """Record everything that is allocated through gpumem; as the process ends, add it to the page.

    That is at Python's exit, at `os._exit`, with which forked children of multiprocessing end, and
    at a signal that ends the process, except SIGKILL.
    """
    # A page is made with the host device, and its workers stop at exit. That is registered here,
    # so that it happens after the page.
    Device("host")._open()
    # The module that writes the page is imported with this one: named tuples and data classes that
    # are made at exit let Python forget that Ctrl-C ended the program, and change its exit status.
    global _options
    _options = options = Options.of_environment()
    _begin_recording(options)
    os.register_at_fork(after_in_child=lambda: _begin_recording(options))
    atexit.register(end)
    leave = os._exit

    def end_and_leave(status: int) -> NoReturn:
        try:
            end()
        finally:
            leave(status)

    os._exit = end_and_leave


def _begin_recording(options: Options) -> None:
    global _recording, _problem, _state
    _recording, _problem, _state = None, "", "running"
    call_with_first_resource(lambda: processes.note(options.job(), processes.BEGUN))
    try:
        _recording = observe.record(capacity=EVENTS, stacks=options.stacks)
    except (MemoryError, GpumemError) as error:
        _problem = f"it was not recorded: {error}"


def end() -> bool:
    """Add this process to the page, once; return False while an earlier call does."""
    global _state
    if _options is not None and _state == "running":
        _state = "ending"
        try:
            _write(_options)
        finally:
            _state = "ended"
    return _state != "ending"


def _write(options: Options) -> None:
    page = Path(options.report)
    started = os.getpid() == options.process  # mostly the last one to end
    traces: list[Trace] = []
    problem = _problem
    missing: dict[str, str] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of events that a ring has lost: the page says so
            if _recording is not None:
                _recording.stop()
                with contextlib.suppress(TraceError):  # nothing was allocated
                    traces = _recording._traces(None)
            try:
                missing = _add(traces, options, problem)
            except (MemoryError, GpumemError) as error:
                missing = _add([], options, f"its page cannot be made: {error}")
    except OSError as error:
        _report(f"{page}: cannot be written: {error.strerror}")
        return
    # A launcher and its helpers have PyTorch enabled and allocate nothing: that is no news.
    if not started:
        return
    if joined.job_of(page) == options.job():
        _report(f"wrote {page}")
    elif not torch.status().enabled:
        _report(
            f"{page}: not written: no block was allocated through gpumem; without a GPU, a page "
            "shows the arenas that the program makes itself, and `gpumem predict -o FILE SCRIPT` "
            "records what PyTorch would allocate on one, for `gpumem report FILE`"
        )
    if missing:
        _report(f"{page}: {processes.text_of(missing)}")


def end_without_recording() -> None:
    """Complete the page at the end of a first process that has not used gpumem itself."""
    global _options
    _options = Options.of_environment()
    end()


def _add(traces: list[Trace], options: Options, problem: str) -> dict[str, str]:
    page, rank = Path(options.report), os.environ.get("RANK", "")
    label = f"rank {rank}" if rank.isdigit() else f"process {os.getpid()}"
    return joined.add_runs(traces, page, job=options.job(), label=label, problem=problem)


def _report(text: str) -> None:
    print(f"gpumem: {' '.join(text.split())}", file=sys.stderr)

"""One run of a script: what it notes, when it ends, and its answer."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import resource
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from .callers import Callers
from .null import ASSUMED, READ, REFUSED, Listener
from .program import Program
from .skipped import said

MAX_READS = 10_000
"""Reads at one line between two steps: more are a loop that waits for a value."""

MAX_DOUBTFUL_READS = 200
"""The same for integers, after which it is more likely that the run with true ones ends."""

_WRONG = "the figures are wrong"

# Operators that read values of the device to know the size of their result.
SHAPING = re.compile(
    r"nonzero|masked_select|_?unique\w*|repeat_interleave\w*|bincount|nms\w*|_nested\w*"
    r"|_?coalesce\w*|_?ctc_loss\w*"
)


class ScriptRun:
    """One run of a script: its notes, its end and its answer."""

    def __init__(
        self,
        order: dict[str, Any],
        library: ctypes.CDLL,
        program: Program,
        allocator: str,
        value: int | None,
    ) -> None:
        self.order = order
        self.library = library
        self.program = program
        self.allocator = allocator
        self.value = value  # of the name that varies
        self.callers = Callers(program.file)
        self.reads: Counter[tuple[str, str, int]] = Counter()
        self.refused: Counter[tuple[str, str, str]] = Counter()
        self.assumed: Counter[str] = Counter()
        self.since_step: Counter[str] = Counter()
        self.steps: Counter[int] = Counter()  # by optimizer
        self.times: list[float] = []
        self.peaks: dict[int, tuple[int, int]] = {}  # live and reserved, before resets
        self.mode = ""  # of gpumem beneath PyTorch
        self.stop_recording: Callable[[], object] | None = None
        self.readers: Any = None  # `values` imports PyTorch, which the null CUDA precedes
        self.values: Any = None
        self.is_doubtful = False  # integers may have been read that zeros stood in for
        self.listener = Listener(self.note)
        library.null_listen(self.listener)

    def note(self, kind: int, name: bytes, to: int, nbytes: int, frames: Any, count: int) -> None:
        """Note a read, a refusal or an assumption; end the run where it makes figures wrong."""
        if kind == ASSUMED:
            self.assumed[name.decode()] += 1
            return
        if kind == READ and self.values and self.values.answer(to, nbytes):
            return
        operators = self.callers.operators(frames, count)
        line = self.callers.line(sys._getframe(1))
        if kind == REFUSED:
            if name == b"cuGetExportTable":
                self.refuse_runtime(self.callers.library(frames, count), line)
            self.refused[name.decode(), line, operators[-1] if operators else ""] += 1
            return
        shaping = next((each for each in operators if SHAPING.fullmatch(each)), None)
        is_doubtful = bool(shaping) or self.readers.may_read_integers(nbytes)
        self.is_doubtful |= is_doubtful
        if shaping:
            reason = f"{shaping} makes a size of values on the GPU, which nobody has computed"
            self.finish("stopped", line, reason)
        operator = operators[0] if operators else ""
        self.reads[line, operator, nbytes] += 1
        if is_doubtful or operator != "_local_scalar_dense":
            self.assumed[f"{line}: if a size or a branch follows from the stand-in, {_WRONG}"] += 1
        self.since_step[line] += 1
        most = MAX_READS if self.values or not is_doubtful else MAX_DOUBTFUL_READS
        if self.since_step[line] > most:
            reason = f"it has read {most} values of the GPU: a loop that waits for a value?"
            self.finish("stopped", line, reason)

    def refuse_runtime(self, library: str, line: str) -> None:
        """End the run if a library beside PyTorch's calls the driver by a runtime of its own."""
        if "/nvidia/" not in library and "/torch/lib/" not in library:
            reason = f"{os.path.basename(library)} has a CUDA runtime of its own, which needs a GPU"
            self.finish("stopped", line, f"{reason}: run the script without it")

    def after_step(self, optimizer: object, *_: object) -> None:
        """Count a step of an optimizer, and stop the script after the last one."""
        self.steps[id(optimizer)] += 1
        self.since_step.clear()
        self.times.append(time.perf_counter())
        if self.order["steps"] and self.steps[id(optimizer)] >= self.order["steps"]:
            self.finish("steps")

    def keep_peaks(self, device: int | None = None) -> None:
        """Keep the peaks of a device, or of all, which the program may reset."""
        torch = sys.modules["torch"]
        if not torch.cuda.is_initialized():
            return
        for each in range(torch.cuda.device_count()) if device is None else [device]:
            stats = torch.cuda.memory_stats(each)
            now = (stats.get("requested_bytes.all.peak", 0), stats["reserved_bytes.all.peak"])
            live, reserved = map(max, self.peaks.get(each, (0, 0)), now)
            self.peaks[each] = live, reserved

    def begin(self) -> None:
        """Let PyTorch use the run's allocator, and prepare the script's process."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if self.allocator == "gpumem":
            self.enable_gpumem()
            self.record()
        self.watch_values()
        register_optimizer_step_post_hook(self.after_step)
        reset = torch._C._cuda_resetPeakMemoryStats
        initialize = torch._C._cuda_init

        def keep_and_reset(device: int) -> None:
            self.keep_peaks(device)
            reset(device)

        def set_and_initialize() -> None:
            # PyTorch has been imported before the script could set a variable.
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            settings = next(filter(None, map(os.environ.get, names)), "")
            if self.allocator == "expandable":
                settings = "expandable_segments:True"
            if settings and self.allocator != "gpumem":
                torch.cuda.memory._set_allocator_settings(settings)
            initialize()
            self.record()

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset
        torch._C._cuda_init = set_and_initialize
        if self.order["until"]:
            self.follow_lines(self.order["until"])

    def follow_lines(self, until: str) -> None:
        """End the run where a line such as "train.py:120" is reached, or a function begins."""
        file, _, number = until.rpartition(":")

        def trace(frame: FrameType, *_: object) -> Any:
            code = frame.f_code
            is_in_file = bool(file) and f"/{code.co_filename}".endswith(f"/{file}")
            if code.co_qualname == until or (is_in_file and frame.f_lineno == int(number)):
                self.finish("until")
            return trace if is_in_file else None

        threading.settrace(trace)
        sys.settrace(trace)

    def watch_values(self) -> None:
        """Know what is read of the GPU, and compute integers beside if the order says so."""
        from ._values import Readers, Values

        self.readers = Readers(self.reads.total, self.note_comparison)
        if self.order.get("beside"):
            self.values = Values()
            self.values.begin()

    def note_comparison(self) -> None:
        """Note that the script compares a value that zero stands in for."""
        line = self.callers.line(sys._getframe(2))
        self.assumed[f"{line}: compares a stand-in: if the branch is another one, {_WRONG}"] += 1

    def enable_gpumem(self) -> None:
        """Put gpumem beneath PyTorch, in place of its allocator where that can be compiled."""
        from gpumem.integrations import torch as gpumem_torch

        gpumem_torch.record_phases()
        with warnings.catch_warnings(record=True, action="always") as found:
            gpumem_torch.enable()
        self.assumed.update(str(each.message) for each in found)
        self.mode = gpumem_torch.status().mode or ""

    def record(self) -> None:
        """Begin to record, by the allocator that knows the blocks; above pools it is PyTorch's."""
        if self.order["recorded"] != self.allocator or self.stop_recording:
            return
        if self.mode == "full":
            from gpumem import observe

            recording = observe.record(path=self.order["recording"], stacks=True)
            self.stop_recording = recording.stop
            return
        memory = sys.modules["torch"].cuda.memory
        memory._record_memory_history(context="alloc", stacks="python")
        self.stop_recording = functools.partial(memory._dump_snapshot, self.order["recording"])

    def run(self) -> NoReturn:
        """Run the script to its end, or to the end of the run, and answer."""
        path = path_of_answer(self.order, self.allocator, self.value)
        output = os.open(f"{path}.out", os.O_CREAT | os.O_WRONLY, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            self.begin()
            self.program.run(self.value)
        except SystemExit as error:
            if error.code not in (None, 0):
                self.finish("failed", "", f"it ended with exit status {error.code}")
        except BaseException as error:
            self.fail(error)
        self.finish("script")

    def fail(self, error: BaseException) -> NoReturn:
        """Answer that the script raised an error."""
        line = self.callers.line_of_error(error.__traceback__)
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        if isinstance(error, sys.modules["torch"].OutOfMemoryError):
            self.finish("memory", line, text)
        traceback.print_exc()
        refused = [key for key in self.refused if key[1] == line or not line]
        if refused:
            name, place, operator = refused[-1]
            self.finish("stopped", place, f"{operator or 'it'} needs {name}, which has no result")
        if self.reads:
            text += (
                f"; zeros stood in for values that it had read at {next(reversed(self.reads))[0]}"
            )
        self.finish("failed", line, text)

    def finish(self, end: str, line: str = "", reason: str = "") -> NoReturn:
        """Write the answer and end the process, without its exit handlers."""
        self.library.null_listen(None)
        self.keep_peaks()
        if self.stop_recording:
            self.stop_recording()
        live = max((live for live, _ in self.peaks.values()), default=0)
        if not live and end in ("script", "steps", "until"):
            reason = (
                "its process has used no memory of the GPU; processes that it starts are not seen"
            )
            end = "stopped"
        if self.order["until"] and end == "script":
            self.assumed[f"{self.order['until']} was not reached"] += 1
        gaps = sorted(b - a for a, b in zip(self.times, self.times[1:], strict=False))
        answer = {
            "end": end,
            "line": line,
            "reason": reason,
            "steps": max(self.steps.values(), default=0),
            "seconds": gaps[len(gaps) // 2] if gaps else None,
            "live": live,
            "reserved": max((reserved for _, reserved in self.peaks.values()), default=0),
            "reads": [[*key, count] for key, count in self.reads.most_common()],
            "refused": [[*key, count] for key, count in self.refused.most_common()],
            "assumed": [*self.assumed, *said],
            "mode": self.mode,
            "integers": [self.is_doubtful, bool(self.values and self.values.differs)],
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        answer_to(path_of_answer(self.order, self.allocator, self.value), answer)
        os._exit(0)


def path_of_answer(order: dict[str, Any], allocator: str, value: int | None) -> str:
    """Return the file of a run's answer; its output is beside."""
    return os.path.join(order["folder"], allocator if value is None else f"{allocator}-{value}")


def answer_to(path: str, answer: dict[str, Any]) -> None:
    """Write the answer of a run."""
    with open(path, "w") as file:
        json.dump(answer, file)

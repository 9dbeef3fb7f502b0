"""Runs a script over the null CUDA: the program of a child process of `gpumem.prediction`.

It is started by its path and imports nothing of gpumem unless a run is one with gpumem's allocator,
so that the process is that of the script. It imports PyTorch and what the script begins with, and
forks for each run. A run's answer is one JSON object, in a file named after its allocator.

The one argument is a JSON object, the order: the path of the null CUDA (`library`), the fields of
`NullDevice` (`device`), the `allocators` of the runs, the number of `steps` after which the script
is stopped, the script with its arguments (`command`), the `folder` for answers and outputs, and
whether the script's imports are run `ahead` of the forks.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import re
import resource
import runpy
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from types import FrameType, TracebackType
from typing import Any, NoReturn

MAX_ATTRIBUTES = 160
READ, REFUSED, ASSUMED = range(3)

MAX_READS = 10_000
"""Reads at one line between two steps: more are a loop that waits for a value."""

# Operators that read values of the device to know the size of their result.
SHAPING = re.compile(
    r"nonzero|masked_select|_?unique\w*|repeat_interleave\w*|bincount|nms\w*|_nested\w*"
    r"|_?coalesce\w*|_?ctc_loss\w*"
)

_OPERATOR = re.compile(rb"_ZN(?:2at4_ops|6vision3ops)(\d+)")


class NullDevice(ctypes.Structure):
    """The struct of that name in null.h."""

    _fields_ = [
        ("count", ctypes.c_int),
        ("cuda", ctypes.c_int),
        ("total", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("name", ctypes.c_char * 256),
        ("attributes", ctypes.c_int * MAX_ATTRIBUTES),
    ]


Listener = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
)


def load(path: str, device: dict[str, Any]) -> ctypes.CDLL:
    """Load the null CUDA, so that libraries loaded later call it, and set its devices."""
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    attributes = (ctypes.c_int * MAX_ATTRIBUTES)()
    for number, value in device["attributes"].items():
        attributes[int(number)] = value
    numbers = (device["count"], device["cuda"], device["total"], device["context"])
    made = NullDevice(*numbers, device["name"].encode(), attributes)
    library.null_configure(ctypes.byref(made))
    return library


def memory_of(library: ctypes.CDLL, device: int) -> tuple[int, int]:
    """Return the bytes of a device that are used, and their peak."""
    used, peak = ctypes.c_uint64(), ctypes.c_uint64()
    library.null_memory(device, ctypes.byref(used), ctypes.byref(peak))
    return used.value, peak.value


# ---- callers -------------------------------------------------------------------------------------


class Callers:
    """Finds the line of the script, and the operator, that a call into CUDA comes from."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.folder = os.path.dirname(script) + os.sep
        self.names: dict[int, str] = {}  # of operators, by return address
        self.dladdr = ctypes.CDLL(None).dladdr

    def is_own(self, file: str) -> bool:
        """Whether a file is the script or lies beside it."""
        if file == self.script:
            return True
        return file.startswith(self.folder) and "site-packages" not in file

    def line(self, frame: FrameType | None) -> str:
        """Return the innermost line of the script: "train.py:12"."""
        inner = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if self.is_own(file):
                return f"{file.removeprefix(self.folder)}:{frame.f_lineno}"
            if file != __file__ and not inner:
                inner = f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return inner or "in backward"

    def line_of_error(self, trace: TracebackType | None) -> str:
        """Return the innermost line of the script in a traceback."""
        found = ""
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if self.is_own(file):
                found = f"{file.removeprefix(self.folder)}:{trace.tb_lineno}"
            trace = trace.tb_next
        return found

    def operators(self, frames: Any, count: int) -> list[str]:
        """Return PyTorch's operators that run, innermost first, each once."""
        found = dict.fromkeys(self.operator(frames[i]) for i in range(count))
        return [name for name in found if name]

    def operator(self, address: int) -> str:
        """Return the operator that a return address lies in, by its C++ symbol; or ""."""
        name = self.names.get(address)
        if name is None:
            symbol = (ctypes.c_void_p * 4)()  # file, its base, name, address
            self.dladdr(ctypes.c_void_p(address), symbol)
            mangled = ctypes.string_at(symbol[2]) if symbol[2] else b""
            match = _OPERATOR.match(mangled)
            end = match.end() if match else 0
            name = mangled[end : end + int(match[1])].decode() if match else ""
            self.names[address] = name
        return name


# ---- the run -------------------------------------------------------------------------------------


class ScriptRun:
    """One run of a script: its notes, its end and its answer."""

    def __init__(self, order: dict[str, Any], library: ctypes.CDLL, allocator: str) -> None:
        self.order = order
        self.library = library
        self.allocator = allocator
        self.script = os.path.abspath(order["command"][0])
        self.callers = Callers(self.script)
        self.reads: Counter[tuple[str, str, int]] = Counter()
        self.refused: Counter[tuple[str, str, str]] = Counter()
        self.assumed: Counter[str] = Counter()
        self.since_step: Counter[str] = Counter()
        self.steps: Counter[int] = Counter()  # by optimizer
        self.times: list[float] = []
        self.peaks: dict[int, tuple[int, int]] = {}  # live and reserved, before resets
        self.listener = Listener(self.note)
        library.null_listen(self.listener)

    def note(self, kind: int, name: bytes, nbytes: int, frames: Any, count: int) -> None:
        """Note a read, a refusal or an assumption; end the run where it makes figures wrong."""
        if kind == ASSUMED:
            self.assumed[name.decode()] += 1
            return
        operators = self.callers.operators(frames, count)
        line = self.callers.line(sys._getframe(1))
        if kind == REFUSED:
            self.refused[name.decode(), line, operators[-1] if operators else ""] += 1
            return
        shaping = next((each for each in operators if SHAPING.fullmatch(each)), None)
        if shaping:
            reason = f"{shaping} makes a size of values on the GPU, which nobody has computed"
            self.finish("stopped", line, reason)
        self.reads[line, operators[0] if operators else "", nbytes] += 1
        self.since_step[line] += 1
        if self.since_step[line] > MAX_READS:
            reason = f"it has read {MAX_READS} values of the GPU: a loop that waits for a value?"
            self.finish("stopped", line, reason)

    def after_step(self, optimizer: object, *_: object) -> None:
        """Count a step of an optimizer, and stop the script after the last one."""
        self.steps[id(optimizer)] += 1
        self.since_step.clear()
        self.times.append(time.perf_counter())
        if self.steps[id(optimizer)] >= self.order["steps"]:
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
            from gpumem.integrations import torch as gpumem_torch

            gpumem_torch.enable(mode="full")
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

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset
        torch._C._cuda_init = set_and_initialize

    def run(self) -> NoReturn:
        """Run the script to its end, or to the end of the run, and answer."""
        try:
            self.begin()
            runpy.run_path(self.script, run_name="__main__")
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
        live = max((live for live, _ in self.peaks.values()), default=0)
        if not live and end in ("script", "steps"):
            reason = (
                "its process has used no memory of the GPU; processes that it starts are not seen"
            )
            end = "stopped"
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
            "assumed": list(self.assumed),
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        answer_to(self.order, self.allocator, answer)
        os._exit(0)


def answer_to(order: dict[str, Any], allocator: str, answer: dict[str, Any]) -> None:
    """Write the answer of a run."""
    with open(os.path.join(order["folder"], f"{allocator}.json"), "w") as file:
        json.dump(answer, file)


def import_ahead(script: str) -> bool:
    """Run the imports that a script begins with; return whether the process can fork after them.

    They take most of the time of many scripts, and are the first that each run does. An error is
    ignored: the runs raise it again.
    """
    with contextlib.suppress(BaseException), open(script, "rb") as file:
        tree = ast.parse(file.read())
        imports = itertools.takewhile(is_import, tree.body)
        code = compile(ast.Module(list(imports), []), script, "exec")
        exec(code, {"__name__": "__main__", "__file__": script})
    return threading.active_count() == 1 and not sys.modules["torch"].cuda.is_initialized()


def is_import(node: ast.stmt) -> bool:
    """Whether a statement is an import, or a docstring."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def main(order: dict[str, Any]) -> None:
    """Run the script over each allocator, at once, and wait for the runs."""
    library = load(order["library"], order["device"])
    importlib.import_module("torch")
    script = os.path.abspath(order["command"][0])
    program = sys.argv[0]
    sys.argv = list(order["command"])
    sys.path[0] = os.path.dirname(script)
    if order["ahead"] and not import_ahead(script):
        again = json.dumps({**order, "ahead": False})
        os.execv(sys.executable, [sys.executable, program, again])
    allocators = {}
    for allocator in order["allocators"]:
        with warnings.catch_warnings(action="ignore"):  # other threads: they only wait for work
            child = os.fork()
        if not child:
            output = os.open(os.path.join(order["folder"], f"{allocator}.out"), os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            ScriptRun(order, library, allocator).run()
        allocators[child] = allocator
    while allocators:
        child, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        path = os.path.join(order["folder"], f"{allocators[child]}.json")
        if not os.path.exists(path):
            reason = f"its process ended with status {code}, without an answer"
            answer_to(order, allocators[child], {"end": "failed", "reason": reason})
        del allocators[child]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

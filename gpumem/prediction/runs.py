"""Runs of a program over the null CUDA, in child processes: one for each allocator."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gpumem._support.arguments import is_same_file, require_each
from gpumem.errors import ConfigError, TraceError
from gpumem.prediction import pytorch
from gpumem.prediction.gpus import Gpu, gpu
from gpumem.prediction.texts import text
from gpumem.report import Peak, peak

ALLOCATORS = ("default", "expandable", "gpumem")
"""PyTorch's allocator, the same with expandable segments, and gpumem in its place."""

STEPS = 3
"""Optimizer steps after which a script is stopped, by default."""

_CHILD = Path(__file__).with_name("child")
_NODE = 8  # GPUs, at most
_AMPLE = 16  # times the GPU's memory, to see how much a script lacks

# Variables that change PyTorch's allocator or its view of the GPUs, or load libraries first.
_REMOVED = {
    "CUDA_VISIBLE_DEVICES",
    "GPUMEM_RUN",
    "LD_PRELOAD",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
}


@dataclass(frozen=True)
class PredictedRun:
    """One run of the script.

    Attributes
    ----------
    allocator : str
        One of `ALLOCATORS`.
    end : str
        Why it ended: "script" to its end, "steps" after the last step, "until" at a line or
        function that was asked for, "memory" out of memory, "stopped" where it cannot be predicted,
        "time" at the time limit, "failed" by an error.
    line, reason : str
        Of an end other than "script", "steps" and "until".
    steps : int
        Optimizer steps.
    seconds : float or None
        Median time of a step.
    live, reserved : int
        Peak of the bytes that tensors requested, and of those that the allocator held. Without a
        limit, if it ran out of memory.
    process : int
        Bytes of the child process, at their peak.
    reads : list
        Line, operator, bytes and number of the reads that zeros stood in for.
    refused : list
        Functions without a result: name, line, operator and number of calls.
    assumed : list of str
        Values that a GPU may have otherwise.
    mode : str
        Of a run with gpumem: that of `gpumem.integrations.torch.enable`.
    output : str
        The script's output.
    value : int or None
        In a search, of the name that varies.
    """

    allocator: str
    end: str
    line: str = ""
    reason: str = ""
    steps: int = 0
    seconds: float | None = None
    live: int = 0
    reserved: int = 0
    process: int = 0
    reads: Sequence[Any] = ()
    refused: Sequence[Any] = ()
    assumed: Sequence[str] = ()
    mode: str = ""
    output: str = ""
    value: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the figures are those of the steps that were asked for."""
        return self.end in ("script", "steps", "until", "memory")


class Constant(NamedTuple):
    """Memory that libraries use, whatever the script does.

    Attributes
    ----------
    name : str
    nbytes : int or None
        None: it is not known.
    inside : bool
        Whether the peaks have it.
    source : str
        How it is known.
    """

    name: str
    nbytes: int | None
    inside: bool
    source: str


@dataclass(frozen=True)
class Prediction:
    """The memory of a script.

    Attributes
    ----------
    gpu : Gpu
    torch, cuda : str
        Versions of PyTorch and of the CUDA that it was built for.
    unknown : list of str
        Functions of CUDA that this PyTorch imports and the null CUDA does not have. A script that
        needs one fails.
    runs : dict
        A `PredictedRun` for each allocator.
    peak : gpumem.observe.Peak or None
        The live peak of the recorded run, by phase, category and line: the run with gpumem if there
        is one, else the first. Without a limit, if that ran out of memory.
    """

    gpu: Gpu
    torch: str
    cuda: str
    unknown: list[str]
    runs: dict[str, PredictedRun]
    peak: Peak | None

    def __repr__(self) -> str:
        return text(self)

    def constants(self) -> list[Constant]:
        """Return the memory of libraries, within the peaks and besides them."""
        source = "an H200 held 527 MiB for a context, and 603 MiB with kernels of cuBLAS and cuDNN"
        found = [Constant("CUDA", self.gpu.context, False, source)]
        groups = self.peak.groups.get("category", ()) if self.peak else ()
        workspaces = next((each.nbytes for each in groups if each.name == "workspaces"), 0)
        if workspaces:
            source = "PyTorch's own size for this GPU, for each thread and stream"
            found.append(Constant("cuBLAS", workspaces, True, source))
        if any("NCCL" in text for run in self.runs.values() for text in run.assumed):
            found.append(Constant("NCCL", None, False, "it grows with channels and ranks"))
        return found

    def room(self, allocator: str) -> int:
        """Return the bytes that remain of the GPU's memory; negative: that it lacks."""
        return self.gpu.memory - self.gpu.context - self.runs[allocator].reserved

    def fits(self, allocator: str) -> bool | None:
        """Return whether the script runs in the GPU's memory; None: it cannot be predicted."""
        run = self.runs[allocator]
        return run.end != "memory" if run.is_complete else None


class Task(NamedTuple):
    """A program, and settings that its runs have in common.

    The program is a script with its arguments; or `call`, a pickled function with its arguments,
    and `command` has the file that it was written in. In a search, `name` has one of `values`.
    `recorded` is the allocator of the run that is written to the file `recording`.
    """

    command: tuple[str, ...]
    call: bytes
    gpu: Gpu
    installed: pytorch.Installed
    allocators: tuple[str, ...]
    steps: int | None
    until: str
    seconds: float
    ranks: int
    name: str = ""
    values: range | None = None
    recorded: str = ""
    recording: str = ""


def predict_script(
    command: Sequence[str],
    *,
    gpu: str = "h100",
    memory: int | None = None,
    steps: int | None = None,
    until: str = "",
    allocators: Sequence[str] = ALLOCATORS,
    seconds: float = 600,
    ranks: int = 1,
    output: str | os.PathLike[str] | None = None,
) -> Prediction:
    """Predict the memory of a script.

    Parameters
    ----------
    command : sequence of str
        The script's path and its arguments.
    gpu : str
        The GPU, of `gpumem.prediction.gpus.names`.
    memory : int, optional
        Bytes of memory that the GPU shall have instead of its own.
    steps : int, optional
        Optimizer steps after which the script is stopped; by default `STEPS`, or none with `until`.
        Without an optimizer it runs to its end.
    until : str
        Line such as "train.py:120" that the script runs up to, or a function as `__qualname__` has
        it, such as "Trainer.evaluate".
    allocators : sequence of str
        Some of `ALLOCATORS`; a process runs the script for each, all at once.
    seconds : float
        Time after which a run is ended.
    ranks : int
        Processes of a distributed script. Rank 0 runs, as torchrun starts it on a node of up to
        eight GPUs.
    output : str or path, optional
        File for the recording of a run, for `gpumem.observe.write_report` and the command line. It
        is a file of `gpumem.observe.record` or, without gpumem in place of PyTorch's allocator, a
        memory snapshot of PyTorch.

    Raises
    ------
    ConfigError
        The script is not a file, or an argument is invalid.
    MissingFrameworkError
        PyTorch is not installed.
    IntegrationError
        This is not Linux, or PyTorch was built without CUDA or is too old.
    """
    program = script_of(command), b""
    task = task_of(program, gpu, memory, steps, until, allocators, seconds, ranks)
    return predict_task(task, output)


def script_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return a script with its arguments; raise ConfigError unless it is a file."""
    found = require_each("command", command, str, "a str")
    if not found or not os.path.isfile(found[0]):
        raise ConfigError(f"invalid script {list(found[:1])}: expected a file")
    return found


def task_of(
    program: tuple[tuple[str, ...], bytes],
    gpu: str,
    memory: int | None,
    steps: int | None,
    until: str,
    allocators: Sequence[str],
    seconds: float,
    ranks: int,
) -> Task:
    """Check the settings of runs; see `predict_script`."""
    invalid = [name for name in allocators if name not in ALLOCATORS]
    if invalid or not allocators:
        raise ConfigError(f"invalid allocators = {invalid}: expected some of {ALLOCATORS}")
    if ":" in until and not until.rpartition(":")[2].isdecimal():
        raise ConfigError(f"invalid until = {until!r}: expected a FILE:LINE or a function")
    if steps is None and not until:
        steps = STEPS
    if steps is not None and steps < 1:
        raise ConfigError(f"invalid steps = {steps}: expected 1 or more")
    if ranks < 1:
        raise ConfigError(f"invalid ranks = {ranks}: expected 1 or more")
    target, installed = _gpu(gpu, memory), pytorch.require()
    return Task(*program, target, installed, tuple(allocators), steps, until, seconds, ranks)


def predict_task(task: Task, output: str | os.PathLike[str] | None) -> Prediction:
    """Run a program over each allocator; once more without a limit, to see how much it lacks."""
    if output is not None and is_same_file(output, task.command):
        raise ConfigError(f"invalid output = {os.fspath(output)!r}: expected a file of its own")
    recorded = "gpumem" if "gpumem" in task.allocators else task.allocators[0]
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        recording = os.path.abspath(output or os.path.join(folder, Path(task.command[0]).stem))
        task = task._replace(recorded=recorded, recording=recording)
        runs = {run.allocator: run for run in run_task(task)}
        short = tuple(name for name, run in runs.items() if run.end == "memory")
        if short:
            ample = replace(task.gpu, memory_mib=_AMPLE * task.gpu.memory_mib)
            for run in run_task(task._replace(allocators=short, gpu=ample)):
                lacking = runs[run.allocator]
                found = run if run.is_complete else lacking
                runs[run.allocator] = replace(
                    found, end="memory", line=lacking.line, reason=lacking.reason
                )
        highest = None
        with contextlib.suppress(TraceError):  # it ended before it had allocated
            highest = peak(recording)
    return Prediction(*environment_of(task), runs, highest)


def environment_of(task: Task) -> tuple[Gpu, str, str, list[str]]:
    """Return the first fields of a prediction: the GPU and PyTorch's facts."""
    version, cuda, folder = task.installed
    return task.gpu, version, cuda, pytorch.unknown_functions(folder, library())


_gpu = gpu  # `predict_script` has a parameter of that name


def library() -> Path:
    """Return the file of the null CUDA."""
    return Path(__file__).with_name("null_cuda.so.1")


def device_of(gpu: Gpu, cuda: str, count: int = 1) -> dict[str, Any]:
    """Return the settings of the null CUDA for a GPU and a version of CUDA such as "13.0"."""
    major, minor = map(int, cuda.split(".")[:2])
    return {
        "count": count,
        "cuda": 1000 * major + 10 * minor,
        "total": gpu.memory,
        "context": gpu.context,
        "name": gpu.name,
        "attributes": gpu.attributes(),
    }


def run_task(task: Task, ahead: bool = True) -> list[PredictedRun]:
    """Run a program over each allocator, with each value that a search tries, in forks.

    The imports that it begins with are run once, before the forks, if they are run `ahead`.
    """
    with tempfile.TemporaryDirectory(prefix="gpumem-") as name:
        folder = Path(name)
        # Libraries that look for the driver by its name, such as Triton, find the null CUDA here.
        for each in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (folder / each).symlink_to(library())
        answers = folder / "answers"
        answers.mkdir()
        call = folder / "call"
        call.write_bytes(task.call)
        order = {
            "ahead": ahead and (len(task.allocators) > 1 or task.values is not None),
            "library": str(library()),
            "device": device_of(task.gpu, task.installed.cuda, min(task.ranks, _NODE)),
            "ranks": task.ranks,
            "allocators": task.allocators,
            "steps": task.steps,
            "until": task.until,
            "command": task.command,
            "call": str(call) if task.call else "",
            "path": list(map(str, sys.path)),
            "folder": str(answers),
            "name": task.name,
            "values": task.values and (task.values.start, task.values.stop, task.values.step),
            "recorded": task.recorded,
            "recording": task.recording,
        }
        with (folder / "output").open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, str(_CHILD), json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(folder, task.ranks),
                start_new_session=True,
            )
            end, reason = "failed", "its process ended without an answer"
            try:
                child.wait(task.seconds)
            except subprocess.TimeoutExpired:
                end, reason = "time", f"it ran longer than {task.seconds:g} seconds"
            finally:  # the child, and the workers that it has left
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        common = (folder / "output").read_text(errors="replace")
        runs = []
        for allocator in task.allocators:
            found = answers.glob(f"{allocator}*.out")
            for path in [*found] or [answers / f"{allocator}.out"]:
                answer = path.with_suffix("")
                said = json.loads(answer.read_text()) if answer.exists() else {}
                said.pop("integers", None)  # of the child alone
                text = path.read_text(errors="replace") if path.exists() else ""
                value = path.stem.partition("-")[2]
                said = {"end": end, "reason": reason, "value": int(value) if value else None} | said
                runs.append(PredictedRun(allocator, output=common + text, **said))
            runs.sort(key=lambda run: (task.allocators.index(run.allocator), run.value or 0))
        return runs


def _environment(folder: Path, ranks: int) -> dict[str, str]:
    """Return the environment of a child."""
    kept = {name: value for name, value in os.environ.items() if name not in _REMOVED}
    path = os.environ.get("LD_LIBRARY_PATH")
    kept["LD_LIBRARY_PATH"] = f"{folder}{os.pathsep}{path}" if path else str(folder)
    kept["TRITON_LIBCUDA_PATH"] = str(folder)
    kept["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its processes have no null CUDA
    # Kernels that were chosen by invented times must not reach the caches of real runs.
    kept["TORCHINDUCTOR_CACHE_DIR"] = kept["TRITON_CACHE_DIR"] = str(folder / "kernels")
    if ranks > 1:
        local = min(ranks, _NODE)
        rows: dict[str, object] = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": ranks}
        rows |= {"LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
        kept |= {name: str(value) for name, value in rows.items()}
    return kept

"""Predictions of scripts beside other estimates, and beside runs on a GPU: a table.

The other estimates are PyTorch's MemTracker, over the same null CUDA, `accelerate estimate-memory`
(its functions, with the script's own model, in float32) and four times the weights in float32. None
needs a GPU. With peaks of runs on a GPU each figure has its deviation from the run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.markdown import table
from gpumem.prediction import ALLOCATORS, gpus, predict_script, pytorch
from gpumem.prediction.child import null
from gpumem.prediction.runs import device_of, library

ANCHORS = ("MemTracker", "accelerate", "weights x 4")
FIGURES = ("live", *ALLOCATORS)
WEIGHTS = 4  # parameters, gradients and two states of Adam


class Stopped(BaseException):
    """The last step is over."""


class Root:
    """The largest module that is called, and the steps of the optimizer."""

    def __init__(self, tracker: Any, steps: int) -> None:
        self.tracker = tracker
        self.module: Any = None
        self.parameters = 0
        self.steps, self.done = steps, 0

    def called(self, module: Any, *_: object) -> None:
        count = sum(each.numel() for each in module.parameters())
        if count > self.parameters:
            self.module, self.parameters = module, count
        if module is self.module:
            self.tracker.reset_mod_stats()  # it refuses a second call of a module without this

    def stepped(self, *_: object) -> None:
        self.done += 1
        if self.done >= self.steps:
            raise Stopped


def track(script: str, gpu: str, steps: int) -> dict[str, int]:
    """Return the other estimates of a script; this process has run it then."""
    installed = pytorch.require()
    null.load(str(library()), device_of(gpus.gpu(gpu), installed.cuda))
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    tracker = MemTracker()
    root = Root(tracker, steps)
    register_module_forward_pre_hook(root.called)
    register_optimizer_step_post_hook(root.stepped)
    sys.argv, sys.path[0] = [script], str(Path(script).resolve().parent)
    found = {}
    try:
        with contextlib.suppress(Stopped), contextlib.redirect_stdout(sys.stderr), tracker:
            runpy.run_path(script, run_name="__main__")
        peak = tracker.get_tracker_snapshot("peak")
        found["MemTracker"] = peak[torch.device("cuda", 0)]["Total"]
    except Exception as error:
        print(f"{script}: MemTracker: {type(error).__name__}: {error}", file=sys.stderr)
    if root.module is not None:
        found |= of_weights(root)
    return found


def of_weights(root: Root) -> dict[str, int]:
    """Return the estimates that follow from a model alone; of inference, if nothing has stepped."""
    found = {"weights x 4": root.parameters * 4 * WEIGHTS} if root.done else {}
    with contextlib.suppress(ImportError):
        estimate = importlib.import_module("accelerate.commands.estimate")
        from accelerate.utils import calculate_maximum_sizes

        total, _ = calculate_maximum_sizes(root.module.float())
        usage = estimate.estimate_training_usage(total, "float32")
        found["accelerate"] = int(max(usage.values()) if root.done else total)
    return found


def anchors_of(script: str, gpu: str, steps: int) -> dict[str, int]:
    """Return the other estimates of a script, found in a process of its own."""
    command = [sys.executable, "-m", "bench.predictions", "--gpu", gpu, "--steps", str(steps)]
    done = subprocess.run([*command, "--track", script], stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {}


def predicted(script: str, gpu: str, steps: int) -> tuple[dict[str, int], str]:
    """Return the figures of a prediction, and why a figure is missing."""
    runs = predict_script([script], gpu=gpu, steps=steps).runs
    complete = {name: run for name, run in runs.items() if run.is_complete}
    found = {name: run.reserved for name, run in complete.items()}
    if "default" in complete:
        found["live"] = complete["default"].live
    missing = {f"{run.line}: {run.reason}" for name, run in runs.items() if name not in complete}
    return found, "; ".join(sorted(missing))


def truth_of(path: Path) -> dict[str, dict[str, int]]:
    """Return the peaks of runs on a GPU, by script and figure."""
    peaks = json.loads(path.read_text())["peaks"]
    return {
        script: {"live": runs["default"]["live"]}
        | {allocator: run["reserved"] for allocator, run in runs.items()}
        for script, runs in peaks.items()
    }


def cell(estimate: int | None, real: int | None) -> str:
    if estimate is None:
        return "-"
    text = f"{estimate / 2**30:.3f}"
    return f"{text} ({100 * (estimate / real - 1):+.2f} %)" if real else text


def rows(
    scripts: Iterable[str], gpu: str, steps: int, truth: dict[str, dict[str, int]]
) -> Iterable[list[str]]:
    for script in scripts:
        found, missing = predicted(script, gpu, steps)
        anchors = anchors_of(script, gpu, steps)
        real = truth.get(Path(script).stem, {})
        if missing:
            print(f"{script}: {missing}", file=sys.stderr)
        figures = [cell(found.get(name), real.get(name)) for name in FIGURES]
        others = [cell(anchors.get(name), real.get("live")) for name in ANCHORS]
        yield [Path(script).stem, *figures, *others]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predictions", description=__doc__)
    parser.add_argument("scripts", nargs="*")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--truth", type=Path, help="peaks of runs on a GPU: bench/scripts/h200.json"
    )
    parser.add_argument("--track", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.track:
        print(json.dumps(track(chosen.track, chosen.gpu, chosen.steps)))
        return 0
    heads = ["GiB", "live", "PyTorch", "expandable segments", "gpumem", *ANCHORS]
    truth = truth_of(chosen.truth) if chosen.truth else {}
    lines = 0
    for row in rows(chosen.scripts, chosen.gpu, chosen.steps, truth):
        print("\n".join(table(heads, [row]).splitlines()[lines:]), flush=True)
        lines = 2  # the head is printed once
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predictions as text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpumem._support.sizes import format_size
from gpumem._support.texts import counted

if TYPE_CHECKING:
    from gpumem.prediction.runs import PredictedRun, Prediction
    from gpumem.prediction.search import Search

_MAX_READS = 8


def text(prediction: Prediction) -> str:
    """Write a prediction: a line for each allocator, and the things that it rests on."""
    gpu = prediction.gpu
    lines = [
        f"{gpu.name}, {format_size(gpu.memory)} with {format_size(gpu.context)} for a context, "
        f"an estimate; PyTorch {prediction.torch}"
    ]
    lines += [
        f"{name:<11}{format_size(run.live):>10} live {format_size(run.reserved):>10} reserved  "
        f"{verdict(prediction, run)}"
        for name, run in prediction.runs.items()
    ]
    return "\n".join([*lines, *notices(prediction)])


def verdict(prediction: Prediction, run: PredictedRun) -> str:
    """Say whether a run fits, or why that is not known."""
    if not run.is_complete:
        return f"not predicted: {run.line}{': ' if run.line else ''}{run.reason}"
    room = prediction.room(run.allocator)
    if run.end != "memory":
        return f"fits; {format_size(room)} remain"
    asked = re.search(r"Tried to allocate ([\d.]+) GiB", run.reason)  # PyTorch's words
    if room < 0:
        lack = f"{format_size(-room)} too much"
    elif asked and float(asked[1]) * (1 << 30) > prediction.gpu.memory:  # even without a limit
        lack = f"one request has {asked[1]} GiB"
    else:
        lack = "the allocator's memory is in pieces"
    phase = prediction.peak.phase if prediction.peak else ""
    during = f"peak in {phase}, " if phase else ""
    return f"does not fit: {during}{lack}; out of memory at {run.line}"


def answer(search: Search, allocator: str) -> str:
    """Say why a search has ended at its largest value, or that it has none."""
    run, refused = search.prediction.runs[allocator], search.refused(allocator)
    if not run.is_complete:
        tried = "" if run.value is None else f" with {search.name} = {run.value}"
        return f"{verdict(search.prediction, run)}{tried}"
    if refused is None:
        return "the last one of the range fits"
    return f"{refused.value} is out of memory at {refused.line}"


def notices(prediction: Prediction) -> list[str]:
    """Name each thing that the figures rest on, besides the program."""
    lines = []
    if not prediction.gpu.compared:
        lines.append("no prediction for this GPU was compared with a run on it")
    if prediction.unknown:
        names = ", ".join(prediction.unknown)
        lines.append(f"unknown functions of this PyTorch, which fail if they are called: {names}")
    each = (line for run in prediction.runs.values() for line in _notices_of(run))
    return [*lines, *dict.fromkeys(each)]


def _notices_of(run: PredictedRun) -> list[str]:
    """Name each thing that the figures rest on, besides the script."""
    lines = [
        f"{line}: a stand-in for {counted(nbytes, 'byte')} that {operator or 'a copy'} reads "
        f"from the GPU, {counted(count, 'time')}"
        for line, operator, nbytes, count in run.reads[:_MAX_READS]
    ]
    if len(run.reads) > _MAX_READS:
        lines.append(f"{len(run.reads) - _MAX_READS} other reads")
    lines += [f"{line}: {name} has no result" for name, line, _, _ in run.refused]
    return [*lines, *run.assumed]

"""Time small calls side by side: short batches of each in turn, medians, ratios within a round.

A shared machine drifts by tens of per cent within minutes, so two figures compare only when they
were taken in turn. A round runs one batch of every candidate; the ratio of two candidates is
the median over rounds of their ratio within a round. The empty loop is measured as a candidate
of its own and subtracted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

Candidate = Callable[[], Any]
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Timing:
    """Median nanoseconds per call of each candidate, and its ratio to the reference."""

    nanoseconds: dict[str, float]
    ratios: dict[str, float]
    reference: str
    rounds: int


def interleave(
    candidates: Mapping[str, Candidate],
    reference: str,
    *,
    rounds: int = 25,
    batch_seconds: float = 0.004,
    around: Mapping[str, Around] | None = None,
) -> Timing:
    """Time every candidate in turn, `rounds` times.

    Parameters
    ----------
    candidates : mapping of name to callable
        Each is called without arguments; what it returns is dropped inside the timed loop.
    reference : str
        The candidate that ratios are against.
    rounds : int
        At least five.
    batch_seconds : float
        About how long one batch takes, in seconds.
    around : mapping of name to callable, optional
        Makes the context of a candidate's batches, such as a setting of its library.
    """
    within = {name: (around or {}).get(name, nullcontext) for name in candidates}
    calls = {}
    for name, call in candidates.items():
        with within[name]():
            calls[name] = _calls_per_batch(call, batch_seconds)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in candidates.items():
                with within[name]():
                    samples[name].append(net_nanoseconds(call, calls[name]))
    finally:
        if was_enabled:
            gc.enable()
    return timing_of(samples, reference)


def timing_of(samples: Mapping[str, list[float]], reference: str) -> Timing:
    """Sum up samples that were taken in turn, one of each candidate in a round."""
    nanoseconds = {name: statistics.median(values) for name, values in samples.items()}
    ratios = ratios_within_rounds(samples, reference)
    return Timing(nanoseconds, ratios, reference, len(samples[reference]))


def ratios_within_rounds(samples: Mapping[str, list[float]], reference: str) -> dict[str, float]:
    """Divide each sample by the reference's of its round; the medians over rounds."""
    return {
        name: statistics.median(a / b for a, b in zip(values, samples[reference], strict=True))
        for name, values in samples.items()
    }


def net_nanoseconds(call: Candidate, count: int) -> float:
    """Nanoseconds per call of one batch, less those of the empty loop right before it."""
    loop = _batch(_nothing, count)
    return (_batch(call, count) - loop) / count


def _nothing() -> None:
    """Do nothing: the cost of any call."""


def _batch(call: Candidate, count: int) -> int:
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    return time.perf_counter_ns() - begin


def _calls_per_batch(call: Candidate, seconds: float) -> int:
    count = 1
    while True:
        elapsed = _batch(call, count)
        if elapsed > seconds * 1e8:
            return max(1, int(count * seconds * 1e9 / elapsed))
        count *= 4

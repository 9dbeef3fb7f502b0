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
from dataclasses import dataclass
from typing import Any

Candidate = Callable[[], Any]


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
    """
    calls = {name: _calls_per_batch(call, batch_seconds) for name, call in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in candidates.items():
                loop = _batch(_nothing, calls[name])
                samples[name].append((_batch(call, calls[name]) - loop) / calls[name])
    finally:
        if was_enabled:
            gc.enable()
    nanoseconds = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(values, samples[reference], strict=True))
        for name, values in samples.items()
    }
    return Timing(nanoseconds, ratios, reference, rounds)


def _nothing() -> None:
    """Cost what any call costs."""


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

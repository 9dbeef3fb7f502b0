"""Plans of a recorded iteration: an offset for each of its allocations, in the order they come.

A training step or a request that repeats allocates the same blocks again. One iteration is
recorded, laid out at leisure, and followed from then on (`PlannedResource`).

>>> from gpumem.traces import Trace
>>> step = Trace(action=[0, 0, 2, 0, 2, 2], block=[0, 1, 0, 2, 2, 1],
...              size=[512, 256, 512, 300, 300, 256], stream=[0] * 6, time_us=range(6))
>>> plan_iteration = plan(step)
>>> plan_iteration.offsets.tolist(), plan_iteration.peak_bytes, plan_iteration.verify()
([0, 512, 0], 768, True)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpumem._support.arguments import require
from gpumem.errors import ConfigError, ModelGraphError
from gpumem.planning.memory.bodies import rounded
from gpumem.planning.memory.offsets import BlockLifetime, assign_offsets, lower_bound
from gpumem.traces.trace import ALLOC, FREE_COMPLETED, Trace

__all__ = ["IterationPlan", "plan"]

ALIGNMENT = 256  # bytes; what every block of an arena is rounded up to
SEARCH_WORK = 60_000  # blocks placed anew, about a second: a plan is made once and used often


class IterationPlan:
    """Where each allocation of an iteration lies in one block; made by `plan`.

    Allocations are counted from 0, those of 0 bytes left out.

    Attributes
    ----------
    sizes : ndarray of int64, shape (allocations,)
        Bytes as they were asked for.
    streams : ndarray of int64, shape (allocations,)
        Numbers of streams, counted from 0 in the order of their first allocation.
    offsets : ndarray of int64, shape (allocations,)
        Bytes from the beginning of the block, multiples of 256.
    first, last : ndarray of int64, shape (allocations,)
        Events of the iteration between which a block lives, both included; what outlives the
        iteration lives to its end.
    peak_bytes : int
        Size of the block.
    lower_bound_bytes : int
        The most bytes that live at one event, each block rounded up to 256.
    requested_bytes : int
        The same as they were asked for.
    strategy : str
        What found the offsets.
    name : str
        Of the recording.

    Raises
    ------
    ConfigError
        Arrays of different lengths or out of range.

    Examples
    --------
    >>> both = IterationPlan(sizes=[1000, 1000], streams=[0, 0], offsets=[0, 1024], first=[0, 1],
    ...                      last=[2, 3])
    >>> len(both), both.peak_bytes, both.verify()
    (2, 2048, True)
    """

    def __init__(
        self,
        sizes: ArrayLike,
        streams: ArrayLike,
        offsets: ArrayLike,
        first: ArrayLike,
        last: ArrayLike,
        *,
        strategy: str = "",
        name: str = "",
    ) -> None:
        self.sizes = _column("sizes", sizes, 1)
        self.streams = _column("streams", streams, 0)
        self.offsets = _column("offsets", offsets, 0)
        self.first = _column("first", first, 0)
        self.last = _column("last", last, 0)
        self.strategy = strategy
        self.name = name
        lengths = {len(column) for column in self._columns().values()}
        if len(lengths) > 1:
            raise ConfigError(f"columns of a plan differ in length: {sorted(lengths)}")
        if (self.last < self.first).any() or (np.diff(self.first) < 0).any():
            raise ConfigError("a block ends before it begins, or before the one that came earlier")
        if (self.offsets % ALIGNMENT).any():
            raise ConfigError(f"offsets are multiples of {ALIGNMENT}")

    def _columns(self) -> dict[str, NDArray[np.int64]]:
        return {
            "sizes": self.sizes,
            "streams": self.streams,
            "offsets": self.offsets,
            "first": self.first,
            "last": self.last,
        }

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def peak_bytes(self) -> int:
        """Size of the block."""
        return max((place + block.nbytes for block, place in self._placed()), default=0)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes below which no plan can go."""
        return lower_bound(block for block, _ in self._placed())

    @property
    def requested_bytes(self) -> int:
        """The most that lives at once, as it was asked for."""
        spans = zip(self.sizes.tolist(), self.first.tolist(), self.last.tolist(), strict=True)
        return lower_bound(BlockLifetime(*span) for span in spans)

    def _placed(self) -> Iterator[tuple[BlockLifetime, int]]:
        columns = (self.sizes, self.first, self.last, self.offsets)
        for nbytes, first, last, offset in zip(*(c.tolist() for c in columns), strict=True):
            yield BlockLifetime(rounded(nbytes, ALIGNMENT), first, last), offset

    def verify(self) -> bool:
        """Replay the iteration and prove that no two blocks lie on each other while they live.

        Returns
        -------
        bool
            True.

        Raises
        ------
        ModelGraphError
            Two blocks do; it says which.
        """
        placed = list(self._placed())
        ends = sorted(range(len(placed)), key=lambda n: placed[n][0].last)
        live: list[tuple[int, int, int]] = []  # (offset, end, number), in order
        gone = 0
        for number, (block, offset) in enumerate(placed):
            while placed[ends[gone]][0].last < block.first:
                ended, at = placed[ends[gone]]
                live.remove((at, at + ended.nbytes, ends[gone]))
                gone += 1
            entry = (offset, offset + block.nbytes, number)
            at = bisect.bisect(live, entry)
            for other in live[max(at - 1, 0) : at + 1]:
                if other[0] < entry[1] and entry[0] < other[1]:
                    raise ModelGraphError(f"allocations {other[2]} and {number} lie on each other")
            live.insert(at, entry)
        return True

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON; `from_dict` reads it."""
        columns = {name: column.tolist() for name, column in self._columns().items()}
        return {"name": self.name, "strategy": self.strategy, **columns}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> IterationPlan:
        """Make a plan of what `as_dict` gave.

        Raises
        ------
        ConfigError
            Something is missing, unknown or out of range, or blocks lie on each other.
        """
        wanted = {"name", "strategy", "sizes", "streams", "offsets", "first", "last"}
        if not isinstance(given, dict) or set(given) != wanted:
            raise ConfigError(f"a plan has the keys {', '.join(sorted(wanted))}, and no other")
        made = cls(**given)
        try:
            made.verify()
        except ModelGraphError as error:
            raise ConfigError(str(error)) from error
        return made

    def __repr__(self) -> str:
        return (
            f"<gpumem.planning.IterationPlan of {len(self)} allocations: "
            f"peak {self.peak_bytes} bytes, lower bound {self.lower_bound_bytes}>"
        )


def plan(trace: Trace, step: int | None = None, *, strategy: str = "auto") -> IterationPlan:
    """Lay out the allocations of one recorded iteration.

    Parameters
    ----------
    trace : Trace
        The recording, of `gpumem.traces.load_trace` or a `IterationRecording`.
    step : int, optional
        Which of the iterations that ``trace.step_start`` marks, from 0; None: the whole recording
        is one. What the iteration did not allocate itself has no place. The first one of a
        training run often allocates what stays (states of an optimizer): record a later one.
    strategy : str
        As of `plan_memory`.

    Returns
    -------
    IterationPlan

    Raises
    ------
    TypeError
        `trace` is not a Trace.
    ConfigError
        The recording has no such step, or the strategy is not accepted.

    Notes
    -----
    Record-and-plan for training: Z. Huang et al., "STWeaver: Reducing GPU Memory Fragmentation via
    Spatio-Temporal Planning", 2025.

    Examples
    --------
    >>> from gpumem.traces import load_trace
    >>> iteration = plan(load_trace("gpt2_varlen_train"), step=2)
    >>> iteration.peak_bytes / iteration.requested_bytes < 1.001
    True
    """
    require("trace", trace, Trace, "a Trace, which load_trace or an IterationRecording gives")
    begin, end = _bounds(trace, step)
    rows = list(_blocks(trace, begin, end))
    sizes = [size for size, *_ in rows]
    blocks = [BlockLifetime(rounded(size, ALIGNMENT), first, last) for size, _, first, last in rows]
    layout = assign_offsets(blocks, strategy, SEARCH_WORK)
    numbers: dict[int, int] = {}
    return IterationPlan(
        sizes,
        [numbers.setdefault(stream, len(numbers)) for _, stream, _, _ in rows],
        layout.offsets,
        [block.first for block in blocks],
        [block.last for block in blocks],
        strategy=layout.strategy,
        name=trace.name,
    )


def _bounds(trace: Trace, step: int | None) -> tuple[int, int]:
    """Return the first event of an iteration and the one behind its last."""
    if step is None:
        return 0, trace.events
    starts = [*trace.step_start.tolist(), trace.events]
    steps = len(starts) - 1
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < steps:
        accepted = f"it takes 0 to {steps - 1}" if steps else "the recording marks no steps"
        raise ConfigError(f"step {step!r} is not accepted: {accepted}, or None for all of it")
    return starts[step], starts[step + 1]


def _blocks(trace: Trace, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Give size, stream, first and last event of what the events allocate, in order."""
    actions, numbers = trace.action[begin:end].tolist(), trace.block[begin:end].tolist()
    sizes, streams = trace.size[begin:end].tolist(), trace.stream[begin:end].tolist()
    last: dict[int, int] = {}  # event of an allocation -> event before which its block is free
    live: dict[int, int] = {}  # block -> event of its allocation
    for event, (action, number) in enumerate(zip(actions, numbers, strict=True)):
        if action == ALLOC:
            live[number] = event
            last[event] = end - begin
        elif action == FREE_COMPLETED and number in live:
            last[live.pop(number)] = event - 1
    for event, ended in last.items():
        if sizes[event]:
            yield sizes[event], streams[event], event, ended


def _column(name: str, values: ArrayLike, least: int) -> NDArray[np.int64]:
    """Return numbers as a read-only column of their own."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(f"{name} of a plan is not a row of integers")
    if given.size and not least <= given.min() <= given.max() < 1 << 48:
        raise ConfigError(f"{name} of a plan are from {least} to 2**48 - 1")
    column = given.astype(np.int64)
    column.flags.writeable = False
    return column

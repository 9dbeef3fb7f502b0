"""Plans of a recorded iteration: an offset for each of its allocations, in their order.

A training step or a request that repeats allocates the same blocks again. `IterationRecording`
records one iteration, `plan` assigns the offsets, and a `PlannedResource` follows the plan.

>>> from gpumem.planning import plan
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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpumem._buffer.resource import MemoryResource
from gpumem._support.arguments import is_integer, require
from gpumem._support.sizes import format_size
from gpumem.adaptors import MemoryEvent, log
from gpumem.errors import ConfigError, ModelGraphError
from gpumem.planning.memory.offsets import BlockLifetime, assign_offsets, lower_bound, rounded
from gpumem.traces import ALLOC, FREE_COMPLETED, Trace, TraceBuilder

__all__ = ["IterationPlan", "IterationRecording", "IterationReport", "plan"]


_COLUMNS = ("sizes", "streams", "offsets", "first", "last")
ALIGNMENT = 256  # bytes; what every block of an arena is rounded up to
SEARCH_WORK = 60_000  # blocks placed anew, about a second: a plan is made once and used often


class IterationPlan:
    """Offsets of the allocations of an iteration in one block; made by `plan`.

    Allocations are counted from 0, those of 0 bytes left out.

    Attributes
    ----------
    sizes : ndarray of int64, shape (allocations,)
        Requested bytes.
    streams : ndarray of int64, shape (allocations,)
        Numbers of streams, counted from 0 in the order of their first allocation.
    offsets : ndarray of int64, shape (allocations,)
        Bytes from the start of the block, multiples of 256.
    first, last : ndarray of int64, shape (allocations,)
        First and last event of the iteration at which a block is live. Blocks that outlive the
        iteration are live to its end.
    peak_bytes : int
        Size of the block.
    lower_bound_bytes : int
        The most bytes that live at one event, each block rounded up to 256.
    requested_bytes : int
        The same for requested bytes, not rounded up.
    strategy : str
        Strategy that found the offsets.
    name : str
        Name of the recording.

    Raises
    ------
    ConfigError
        Arrays that are ragged, of different lengths, out of range, or streams in another order.

    Examples
    --------
    >>> from gpumem.planning import IterationPlan
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
        highest = np.maximum.accumulate(np.concatenate([[-1], self.streams]))[:-1]
        early = np.flatnonzero(self.streams > highest + 1)
        if len(early):
            at = early[0]
            raise ConfigError(
                f"invalid stream = {self.streams[at]} of allocation {at}: expected 0 to "
                f"{highest[at] + 1}, as streams are numbered in the order of their first allocation"
            )
        if (self.offsets % ALIGNMENT).any():
            raise ConfigError(f"offsets must be multiples of {ALIGNMENT}")

    def _columns(self) -> dict[str, NDArray[np.int64]]:
        return {name: getattr(self, name) for name in _COLUMNS}

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def peak_bytes(self) -> int:
        """Size of the block."""
        return max((place + block.nbytes for block, place in self._placed()), default=0)

    @property
    def lower_bound_bytes(self) -> int:
        """Most bytes live at once: the least that a plan can need."""
        return lower_bound(block for block, _ in self._placed())

    @property
    def requested_bytes(self) -> int:
        """Most requested bytes live at once."""
        spans = zip(self.sizes.tolist(), self.first.tolist(), self.last.tolist(), strict=True)
        return lower_bound(BlockLifetime(*span) for span in spans)

    def _placed(self) -> Iterator[tuple[BlockLifetime, int]]:
        columns = (self.sizes, self.first, self.last, self.offsets)
        for nbytes, first, last, offset in zip(*(c.tolist() for c in columns), strict=True):
            yield BlockLifetime(rounded(nbytes, ALIGNMENT), first, last), offset

    def verify(self) -> bool:
        """Replay the iteration and prove that no two live blocks overlap.

        Returns
        -------
        bool
            True.

        Raises
        ------
        ModelGraphError
            Two live blocks overlap. The message names them.
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
                    raise ModelGraphError(f"allocations {other[2]} and {number} overlap")
            live.insert(at, entry)
        return True

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON and `from_dict`."""
        columns = {name: column.tolist() for name, column in self._columns().items()}
        return {"name": self.name, "strategy": self.strategy, **columns}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> IterationPlan:
        """Make a plan from the result of `as_dict`.

        Raises
        ------
        ConfigError
            A key is missing or unknown, a value is out of range, or live blocks overlap.
        """
        wanted = {"name", "strategy", *_COLUMNS}
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
            f"peak {format_size(self.peak_bytes)}, "
            f"lower bound {format_size(self.lower_bound_bytes)}>"
        )


def plan(trace: Trace, step: int | None = None, *, strategy: str = "auto") -> IterationPlan:
    """Lay out the allocations of one recorded iteration.

    Parameters
    ----------
    trace : Trace
        The recording, from `gpumem.traces.load_trace` or an `IterationRecording`.
    step : int, optional
        Which of the iterations that ``trace.step_start`` marks, from 0; None: the whole recording
        is one. Blocks that were allocated before the iteration are not planned. The first
        iteration of a training run often allocates memory that stays (optimizer states), so record
        a later one.
    strategy : str
        As in `plan_memory`.

    Returns
    -------
    IterationPlan

    Raises
    ------
    TypeError
        `trace` is not a Trace.
    ConfigError
        The recording has no such step, or the strategy is unknown.

    Notes
    -----
    Record-and-plan for training: Z. Huang et al., "STWeaver: Reducing GPU Memory Fragmentation via
    Spatio-Temporal Planning", 2025.

    Examples
    --------
    >>> from gpumem.planning import plan
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
    """Return the first event of an iteration and the one after its last."""
    if step is None:
        return 0, trace.events
    starts = [*trace.step_start.tolist(), trace.events]
    steps = len(starts) - 1
    if not is_integer(step, 0, steps - 1):
        expected = f"expected 0 to {steps - 1}" if steps else "the recording marks no steps"
        raise ConfigError(f"invalid step = {step!r}: {expected}, or None for all of it")
    return starts[step], starts[step + 1]


def _blocks(trace: Trace, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield size, stream, first and last event of each allocation, in order."""
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
    """Return a read-only copy of the values as a column."""
    try:
        given = np.asarray(values)
    except ValueError as error:  # ragged
        raise ConfigError(f"{name} of a plan is not a row of integers: {error}") from None
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(f"{name} of a plan is not a row of integers")
    if given.size and not least <= given.min() <= given.max() < 1 << 48:
        raise ConfigError(f"{name} of a plan are from {least} to 2**48 - 1")
    column = given.astype(np.int64)
    column.flags.writeable = False
    return column


# ---- reports -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IterationReport:
    """Result of one iteration.

    Attributes
    ----------
    planned : int
        Allocations served at their planned offsets.
    displaced : int
        Allocations that matched the plan, but whose offset was not available: a block was still
        live there, or work of another stream might still use it. The upstream served them.
    online : int
        Allocations after the mismatch; the upstream served them.
    mismatch : str or None
        The first difference from the plan; None if there is none.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.planning import PlannedResource, IterationRecording, plan
    >>> arena = gpumem.Arena("host")
    >>> recording = IterationRecording(arena)
    >>> recording.resource.allocate(1000).close()
    >>> planned = PlannedResource(plan(recording.trace()), arena)
    >>> with planned.iteration():
    ...     planned.allocate(5000).close()       # not what was recorded
    >>> planned.report.planned, planned.report.online, planned.report.mismatch is None
    (0, 1, False)
    """

    planned: int
    displaced: int
    online: int
    mismatch: str | None


# ---- recordings ----------------------------------------------------------------------------------


class IterationRecording:
    """Records the allocations made through its `resource`.

    Persistent and empty blocks are left out, because they are not planned.

    Parameters
    ----------
    upstream : MemoryResource
        Source of the memory.

    Attributes
    ----------
    resource : MemoryResource
        Resource that the iteration allocates from instead of `upstream`.

    Raises
    ------
    TypeError
        `upstream` is not a MemoryResource.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.planning import IterationRecording, plan
    >>> recording = IterationRecording(gpumem.Arena("host"))
    >>> for nbytes in (1000, 2000):
    ...     recording.resource.allocate(nbytes).close()
    >>> plan(recording.trace()).peak_bytes
    2048
    """

    def __init__(self, upstream: MemoryResource) -> None:
        self._events: list[MemoryEvent] = []
        self.resource = log(upstream, self._events.append)

    def trace(self, name: str = "recording") -> Trace:
        """Return the events recorded so far as a trace."""
        builder = TraceBuilder()
        live: set[int] = set()  # addresses of recorded blocks
        # Addresses that one thread allocated again before another thread logged their free.
        overtaken: set[int] = set()
        for number, event in enumerate(list(self._events)):
            what = (f"event {number}", event.ptr, event.nbytes, event.stream, event.time // 1000)
            if event.action == "allocate" and event.ptr and not event.persistent:
                if event.ptr in live:
                    overtaken.add(event.ptr)
                    builder.free_completed(*what)
                builder.alloc(*what)
                live.add(event.ptr)
            elif event.action == "free" and event.ptr in overtaken:
                overtaken.remove(event.ptr)
            elif event.action == "free" and event.ptr in live:
                live.remove(event.ptr)
                builder.free_completed(*what)
        return builder.trace(name, {})

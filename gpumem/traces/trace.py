"""A recorded run of allocations: plain arrays, checked once.

Every reader in this package makes a `Trace`, and every replay takes one. Because a trace is checked
when it is made, the compiled replay loop indexes by block and stream number without checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpumem._events.refusals import RefusedRequest
from gpumem._support.sizes import format_size
from gpumem.errors import TraceError

ALLOC = 0
"""The program allocates a block."""
FREE_REQUESTED = 1
"""The program frees the block; work on other streams may still use it."""
FREE_COMPLETED = 2
"""The memory of the block can be reused."""
UNKNOWN_BLOCK = -1
"""The block number of anything that was allocated before recording began."""

MAX_SIZE = 1 << 48
"""Largest size of one block in bytes: 256 TiB, more than any device addresses."""
MAX_LIVE = 1 << 62
"""Largest sum of live blocks in bytes; keeps every sum inside a signed 64-bit integer."""
MAX_STREAMS = 1024
"""A trace has at most so many streams: a replay makes a real stream of each."""

IntArray: TypeAlias = NDArray[np.integer[Any]]

ACTION_NAMES = ("allocated", "asked to be freed", "freed")
_NEVER_SEEN = -1

# Valid successions of a block's actions: row = last action + 1, column = next action.
_MAY_FOLLOW = np.array(
    [
        [True, False, False],  # never seen: it can only be allocated
        [False, True, True],  # allocated
        [False, False, True],  # free requested
        [True, False, False],  # freed: its number may be used again
    ]
)


@dataclass(frozen=True, eq=False)
class Trace:
    """The allocations of one recorded run, in the order in which they happened.

    All arrays but `step_start` have one entry per event. They are converted to the types
    below, checked and made read-only; a trace that exists is consistent.

    Parameters
    ----------
    action : array_like of int8, shape (events,)
        0 alloc, 1 free requested (the program freed the block), 2 free completed (its memory
        can be reused). 1 may be left out; a replay allocates at 0 and frees at 2.
    block : array_like of int32, shape (events,)
        Number of the block, below the number of allocations; -1 in the free of a block that was
        allocated before the recording began.
    size : array_like of int64, shape (events,)
        Requested bytes; a free repeats the size of its block.
    stream : array_like of int16, shape (events,)
        Stream number, counted from 0.
    time_us : array_like of int64, shape (events,)
        Microseconds since recording began; never decreasing.
    step_start : array_like of int64, shape (steps,), optional
        Index of the event at which each training step or request begins.
    meta : mapping, optional
        Other facts of the recording, such as ``peak_reserved`` of its allocator, in bytes.
    name : str, optional
        Name of the trace in tables and errors.
    details : Details, optional
        Further columns of each allocation.

    Raises
    ------
    TraceError
        An array of the wrong shape or type, or an event that contradicts those before it.

    Examples
    --------
    >>> from gpumem.traces import Trace
    >>> trace = Trace(action=[0, 0, 2], block=[0, 1, 0], size=[100, 50, 100],
    ...               stream=[0, 0, 0], time_us=[0, 5, 9])
    >>> trace.events, trace.allocs, trace.peak_requested, trace.duration_us
    (3, 2, 150, 9)
    """

    action: NDArray[np.int8]
    block: NDArray[np.int32]
    size: NDArray[np.int64]
    stream: NDArray[np.int16]
    time_us: NDArray[np.int64]
    step_start: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    meta: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    details: Details | None = None

    def __post_init__(self) -> None:
        for column, dtype in _COLUMN_TYPES.items():
            # The only writes to a frozen instance: arguments become columns of the declared types.
            object.__setattr__(self, column, _as_column(column, getattr(self, column), dtype))
        object.__setattr__(self, "meta", MappingProxyType(dict(self.meta)))
        _check_lengths(self)
        _check_ranges(self)
        _check_order(self)
        _check_lifetimes(self)
        _check_live_bytes(self)

    def __repr__(self) -> str:
        return (
            f"<Trace {self.name or 'unnamed'}: {self.events} events, {self.allocs} allocations, "
            f"{self.streams} streams, peak {format_size(self.peak_requested)} requested>"
        )

    @property
    def events(self) -> int:
        """Number of events."""
        return int(self.action.size)

    @cached_property
    def allocs(self) -> int:
        """Number of allocations."""
        return int(np.count_nonzero(self.action == ALLOC))

    @cached_property
    def streams(self) -> int:
        """Number of streams: one more than the highest stream number; 0 without events."""
        return int(np.max(self.stream)) + 1 if self.events else 0

    @property
    def duration_us(self) -> int:
        """Microseconds from the first event to the last."""
        return int(self.time_us[-1] - self.time_us[0]) if self.events else 0

    @cached_property
    def peak_requested(self) -> int:
        """Peak of the live bytes, as requested (a block lives until its free completes)."""
        return int(np.max(self.live_bytes(), initial=0))

    def live_bytes(self) -> NDArray[np.int64]:
        """Return the bytes live after each event, as requested.

        Returns
        -------
        ndarray of int64, shape (events,)
            Bytes in blocks that are allocated and not completely freed.
        """
        live: NDArray[np.int64] = np.cumsum(self._held_sign() * self.size)
        return live

    def moving(self) -> NDArray[np.int64]:
        """Return the indices of the events that allocate or free a known block that has bytes."""
        known = (self.action != FREE_REQUESTED) & (self.block != UNKNOWN_BLOCK)
        return np.flatnonzero(known & (self.size > 0))

    def lives(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the events that begin and end the life of each allocation.

        Returns
        -------
        begin : ndarray of int64, shape (allocs,)
        end : ndarray of int64, shape (allocs,)
            The completed free; the number of events where there is none.
        """
        return lives_of(self.action, self.block)

    def _held_sign(self) -> NDArray[np.int64]:
        """Return 1 for every event that begins a block's life, -1 where one ends, else 0."""
        known_free = (self.action == FREE_COMPLETED) & (self.block != UNKNOWN_BLOCK)
        sign: NDArray[np.int64] = (self.action == ALLOC).astype(np.int64) - known_free
        return sign


def lives_of(action: IntArray, block: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the events that begin and end the life of each allocation; see `Trace.lives`."""
    known = np.flatnonzero((action != FREE_REQUESTED) & (block != UNKNOWN_BLOCK))
    # A block number may be used again: side by side, each free follows its allocation.
    order = known[np.argsort(block[known], kind="stable")]
    begin = np.flatnonzero(action == ALLOC)
    end = np.full(begin.size, action.size)
    frees = np.flatnonzero(action[order] == FREE_COMPLETED)
    end[np.searchsorted(begin, order[frees - 1])] = order[frees]
    return begin, end


_COLUMN_TYPES: dict[str, type[np.signedinteger[Any]]] = {
    "action": np.int8,
    "block": np.int32,
    "size": np.int64,
    "stream": np.int16,
    "time_us": np.int64,
    "step_start": np.int64,
}
_EVENT_COLUMNS = tuple(name for name in _COLUMN_TYPES if name != "step_start")


def _as_column(
    name: str, values: ArrayLike, dtype: type[np.signedinteger[Any]]
) -> NDArray[np.signedinteger[Any]]:
    """Return `values` as a read-only one-dimensional array of `dtype`, or raise TraceError."""
    try:
        given = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{name} is not an array of integers: {error}") from None
    if given.ndim != 1:
        raise TraceError(f"{name} has {given.ndim} dimensions, expected 1")
    if given.size and given.dtype.kind not in "iu":
        raise TraceError(f"{name} has type {given.dtype}, expected integers")
    limits = np.iinfo(dtype)
    _refuse(name, given, (given < limits.min) | (given > limits.max), f"{limits.min}..{limits.max}")
    column = given.astype(dtype)  # a copy: the caller's array may change later
    column.flags.writeable = False
    return column


def _refuse(column: str, values: IntArray, bad: NDArray[np.bool_], accepted: str) -> None:
    """Raise TraceError for the first entry of `values` that `bad` marks, if there is one."""
    if bad.any():
        index = int(np.argmax(bad))
        what = "step" if column == "step_start" else "event"
        raise TraceError(f"{what} {index}: {column} is {values[index]}, expected {accepted}")


def _check_lengths(trace: Trace) -> None:
    lengths = {name: getattr(trace, name).size for name in _EVENT_COLUMNS}
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise TraceError(f"arrays differ in length: {listing}")


def _check_ranges(trace: Trace) -> None:
    action, block, size, stream = trace.action, trace.block, trace.size, trace.stream
    _refuse("action", action, (action < ALLOC) | (action > FREE_COMPLETED), "0..2")
    lowest = np.where(action == ALLOC, 0, UNKNOWN_BLOCK)
    # Numbers below the count of allocations let a replay keep its blocks in one flat array.
    _refuse(
        "block",
        block,
        (block < lowest) | (block >= trace.allocs),
        f"0..{trace.allocs - 1} (the trace has {trace.allocs} allocations), or -1 in a free",
    )
    _refuse("size", size, (size < 0) | (size > MAX_SIZE), f"0..{MAX_SIZE} bytes")
    _refuse("stream", stream, (stream < 0) | (stream >= MAX_STREAMS), f"0..{MAX_STREAMS - 1}")
    steps = trace.step_start
    _refuse("step_start", steps, (steps < 0) | (steps > trace.events), f"0..{trace.events}")


def _check_order(trace: Trace) -> None:
    time = trace.time_us
    if time.size and time[0] < 0:
        raise TraceError(f"event 0: time_us is {time[0]}, expected 0 or later")
    _refuse_drop("time_us", time, "event")
    _refuse_drop("step_start", trace.step_start, "step")


def _refuse_drop(column: str, values: NDArray[np.int64], what: str) -> None:
    """Raise TraceError where `values` decrease."""
    drops = values[1:] < values[:-1]
    if drops.any():
        index = int(np.argmax(drops)) + 1
        raise TraceError(
            f"{what} {index}: {column} is {values[index]}, expected {values[index - 1]} or "
            f"later (that of the {what} before)"
        )


def _check_lifetimes(trace: Trace) -> None:
    """Refuse impossible successions: double alloc, free without alloc, double free."""
    known = np.flatnonzero(trace.block != UNKNOWN_BLOCK)
    # A stable sort puts each block's events side by side, still in the order they happened.
    order = known[np.argsort(trace.block[known], kind="stable")]
    action, block, size = trace.action[order], trace.block[order], trace.size[order]
    same_block = np.zeros(order.size, np.bool_)
    same_block[1:] = block[1:] == block[:-1]
    last = np.full(order.size, _NEVER_SEEN)
    last[1:] = np.where(same_block[1:], action[:-1], _NEVER_SEEN)

    impossible = ~_MAY_FOLLOW[last + 1, action]
    resized = np.zeros(order.size, np.bool_)
    resized[1:] = same_block[1:] & (action[1:] != ALLOC) & (size[1:] != size[:-1])
    wrong = impossible | resized
    if not wrong.any():
        return
    # Report the earliest event, not the one of the lowest block number.
    place = int(np.flatnonzero(wrong)[np.argmin(order[wrong])])
    event = f"event {order[place]}: block {block[place]}"
    if impossible[place]:
        raise TraceError(f"{event} {_impossible(int(last[place]), int(action[place]))}")
    raise TraceError(
        f"{event} is freed with size {size[place]}, expected {size[place - 1]} "
        f"(as it was allocated)"
    )


def _impossible(last: int, action: int) -> str:
    """Say in words why `action` cannot follow `last`."""
    accepted = [name for name, ok in enumerate(_MAY_FOLLOW[last + 1]) if ok]
    state = "was never allocated" if last == _NEVER_SEEN else f"was already {ACTION_NAMES[last]}"
    return f"has action {action} but {state}, expected action {' or '.join(map(str, accepted))}"


def _check_live_bytes(trace: Trace) -> None:
    """Refuse traces with sums that would not fit a signed 64-bit integer."""
    if trace.allocs * int(np.max(trace.size, initial=0)) <= MAX_LIVE:
        return
    # Wrapped prefix sums are exact wherever the true sum fits; doubles show where it does not.
    live = np.cumsum(trace._held_sign() * trace.size.astype(np.float64))
    over = live > MAX_LIVE
    if over.any():
        index = int(np.argmax(over))
        raise TraceError(
            f"event {index}: {live[index]:.3g} bytes are live, expected 0..{MAX_LIVE} bytes"
        )


# ---- further columns of a log --------------------------------------------------------------------


class Curve(NamedTuple):
    """Bytes that change at events: ``nbytes[i]`` are held from event ``at[i]`` on, none before.

    Attributes
    ----------
    at : ndarray of int64, shape (changes,)
        Never decreasing; the last of several changes at one event counts.
    nbytes : ndarray of int64, shape (changes,)
    """

    at: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    @property
    def peak(self) -> int:
        """The largest number of bytes."""
        return int(np.max(self.nbytes, initial=0))

    def changes(self) -> Curve:
        """Leave out the events at which nothing changes."""
        kept = np.flatnonzero(np.diff(self.nbytes, prepend=0))
        return Curve(self.at[kept], self.nbytes[kept])

    def by_event(self, events: int) -> NDArray[np.int64]:
        """Return the bytes held at each of `events` events."""
        places = np.searchsorted(self.at, np.arange(events), side="right")
        return np.concatenate([np.zeros(1, np.int64), self.nbytes])[places]


Frames: TypeAlias = tuple[tuple[str, int, str], ...]
"""A stack, the innermost frame first: file, line and name; a native frame has line 0."""


class Segments(NamedTuple):
    """Memory that was reserved from the driver: regions, or pages where they were mapped.

    Attributes
    ----------
    address : ndarray of uint64, shape (segments,)
    nbytes : ndarray of int64, shape (segments,)
    begin : ndarray of int64, shape (segments,)
        Number of events before it was reserved.
    end : ndarray of int64, shape (segments,)
        Number of events before it was released or moved; -1 if it was still there at the end.
    """

    address: NDArray[np.uint64]
    nbytes: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]


class Phase(NamedTuple):
    """A stretch of the program, such as a forward pass; phases may overlap, or lie in each other.

    Attributes
    ----------
    name : str
    begin : int
        Number of events before it began.
    end : int
        Number of events before it ended; that of all events if it had not.
    depth : int
        Number of the phases that were open when it began.
    """

    name: str
    begin: int
    end: int
    depth: int = 0


@dataclass(frozen=True, eq=False)
class Details:
    """Further columns of a log.

    `address`, `owner`, `stack`, `category` and `module` have a row per allocation.

    Attributes
    ----------
    address : ndarray of uint64, shape (allocs,)
        Address of each block, in the order of the allocations.
    owner : ndarray of int32, shape (allocs,)
        Owner of each block, as an index of `owners`.
    owners : tuple of str
        Tags, lines of the program or names; "" if the log has no owner.
    streams : tuple of str
        Name of each stream, by number.
    held : Curve or None
        Bytes reserved from the driver since the log began; None if the log lacks them.
    refusals : tuple of (int, RefusedRequest)
        Number of events before each refused request, and its figures.
    stack : ndarray of int32, shape (allocs,), or None
        Stack of each allocation, as an index of `stacks`; -1: not recorded. None: of none.
    stacks : tuple of Frames
        Each different stack once.
    segments : Segments or None
        None if the log lacks them.
    asleep : Curve or None
        Bytes that went to sleep since the log began. They are not held, though their blocks are
        live; None: nothing slept.
    phases : tuple of Phase
        In the order in which they began, the outer one first of those that began together.
    category : ndarray of int32, shape (allocs,), or None
        Purpose of each block, as an index of `categories`. None: of none.
    categories : tuple of str
        Such as "parameters", "activations", "other".
    module : ndarray of int32, shape (allocs,), or None
        Part of a model that each block belongs to, as an index of `modules`; -1: not known. None:
        of none.
    modules : tuple of str
        Names of classes, the outer ones first: "Decoder / Block / Linear".
    """

    address: NDArray[np.uint64]
    owner: NDArray[np.int32]
    owners: tuple[str, ...]
    streams: tuple[str, ...]
    held: Curve | None = None
    refusals: tuple[tuple[int, RefusedRequest], ...] = ()
    stack: NDArray[np.int32] | None = None
    stacks: tuple[Frames, ...] = ()
    segments: Segments | None = None
    asleep: Curve | None = None
    phases: tuple[Phase, ...] = ()
    category: NDArray[np.int32] | None = None
    categories: tuple[str, ...] = ()
    module: NDArray[np.int32] | None = None
    modules: tuple[str, ...] = ()

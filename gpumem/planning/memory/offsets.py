"""Offsets for blocks of known lifetime: dynamic storage allocation, solved before the run.

Blocks that live at the same time must not overlap, and the highest end should be low. That is
NP-hard, so there are fast orders, a search that improves one, and an exact search for few blocks:

- by size, the largest first, each into the smallest hole that fits among blocks alive with it
  (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020);
- by lifetime, the longest first;
- by time, as a best-fit allocator would;
- by hill climbing over orders;
- exactly, by branch and bound over the order of offsets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpumem._support.texts import shown
from gpumem.errors import ConfigError

EXACT_LIMIT = 16  # blocks
EXACT_BRANCHES = 100_000  # tried before the search returns its best layout
SEARCH_WORK = 4_000  # blocks placed again while an order is improved
MAX_BYTES = (1 << 62) - 1


class BlockLifetime(NamedTuple):
    """Bytes, a multiple of the alignment, and the first and the last step at which they live."""

    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """Offsets of blocks, the highest end, and the strategy that found them."""

    offsets: list[int]
    peak: int
    strategy: str


def rounded(nbytes: int, alignment: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-nbytes // alignment) * alignment


def lower_bound(blocks: Iterable[BlockLifetime]) -> int:
    """Return the peak of the bytes that live at one step: no layout needs less."""
    return busiest(blocks)[0]


def busiest(blocks: Iterable[BlockLifetime]) -> tuple[int, int]:
    """Return the peak of the bytes that live at one step, and the first such step."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.first] = change.get(block.first, 0) + block.nbytes
        change[block.last + 1] = change.get(block.last + 1, 0) - block.nbytes
    live, peak = 0, (0, 0)
    for step in sorted(change):
        live += change[step]
        if live > peak[0]:
            peak = live, step
    return peak


def assign_offsets(blocks: Sequence[BlockLifetime], strategy: str = "auto") -> Layout:
    """Lay blocks out.

    Parameters
    ----------
    blocks : sequence of BlockLifetime
    strategy : str
        A name of `STRATEGIES`; ``"auto"`` stops at the first that reaches the lower bound; if none
        does, it returns the best layout.

    Raises
    ------
    ConfigError
        Unknown strategy, or ``"exact"`` for more blocks than `EXACT_LIMIT`.
    OverflowError
        The blocks have more bytes than the address space.
    """
    if (total := sum(block.nbytes for block in blocks)) > MAX_BYTES:
        raise OverflowError(f"{shown(total)} bytes are more than 2**62 - 1")
    if strategy != "auto" and strategy not in STRATEGIES:
        accepted = ", ".join(("auto", *STRATEGIES))
        raise ConfigError(f"invalid strategy {strategy!r}: expected {accepted}")
    names = _names_for(len(blocks)) if strategy == "auto" else [strategy]
    bound = lower_bound(blocks)
    best: Layout | None = None
    for name in names:
        offsets = STRATEGIES[name](blocks)
        layout = Layout(offsets, peak_of(blocks, offsets), name)
        if best is None or layout.peak < best.peak:
            best = layout
        if best.peak == bound:
            break
    assert best is not None
    return best


def _names_for(count: int) -> list[str]:
    """Return the strategies to try for a number of blocks, in order."""
    names = ["best_fit_by_time", "greedy_by_size"]
    if count <= SEARCH_WORK:
        names.append("hill_climbing")
    if count <= EXACT_LIMIT:
        names.append("exact")
    return names


def peak_of(blocks: Sequence[BlockLifetime], offsets: Sequence[int]) -> int:
    """Return the highest end."""
    ends = (offset + block.nbytes for block, offset in zip(blocks, offsets, strict=True))
    return max(ends, default=0)


# ---- by an order of blocks -----------------------------------------------------------------------


def greedy_by_size(blocks: Sequence[BlockLifetime]) -> list[int]:
    """Place the largest first; of equal ones the one that lives longer."""
    return _placed(blocks, _by_size(blocks))


def greedy_by_lifetime(blocks: Sequence[BlockLifetime]) -> list[int]:
    """Place the longest lifetime first; of equal ones the larger block."""
    return _placed(blocks, _by_lifetime(blocks))


def hill_climbing(blocks: Sequence[BlockLifetime]) -> list[int]:
    """Begin with the better greedy order and improve it by moves, as long as work allows.

    A move takes a block of the peak, or one alive at the same time as such a block, and places it
    before another one alive with it (after the allocator of Arm's Vela compiler). An order that is
    not worse is kept, so that the search crosses plateaus. The moves are drawn from a fixed seed:
    equal blocks have equal offsets.
    """
    climb = _Climb(blocks)
    climb.run(lower_bound(blocks))
    return climb.offsets


class _Climb:
    """An order of blocks, its offsets, and the number of blocks that may still be placed."""

    def __init__(self, blocks: Sequence[BlockLifetime]) -> None:
        self._blocks = blocks
        self._left = SEARCH_WORK
        self._random = random.Random(len(blocks))
        orders = (_by_size(blocks), _by_lifetime(blocks))
        starts = [(_placed(blocks, order), order) for order in orders]
        self.offsets, self._order = min(starts, key=lambda start: peak_of(blocks, start[0]))

    def run(self, bound: int) -> None:
        """Move until the bound is reached or the work is done."""
        while self._left > 0 and peak_of(self._blocks, self.offsets) > bound:
            self._move()

    def _move(self) -> None:
        blocks, order = self._blocks, self._order
        peak = peak_of(blocks, self.offsets)
        ends = (n for n, i in enumerate(order) if self.offsets[i] + blocks[i].nbytes == peak)
        moved = self._random.choice(list(ends))
        if self._random.random() < 0.5:
            moved = self._earlier(moved)
        begin = self._earlier(moved)
        self._left -= max(len(order) - begin, 1)
        if begin == moved:
            return
        order = [*order[:begin], order[moved], *order[begin:moved], *order[moved + 1 :]]
        offsets = _placed(blocks, order, self.offsets, begin)
        if peak_of(blocks, offsets) <= peak:
            self._order, self.offsets = order, offsets

    def _earlier(self, position: int) -> int:
        """Choose the position of an earlier block alive at the same time; its own if none."""
        block = self._blocks[self._order[position]]
        before = [
            n
            for n, i in enumerate(self._order[:position])
            if self._blocks[i].first <= block.last and self._blocks[i].last >= block.first
        ]
        return self._random.choice(before) if before else position


def _by_size(blocks: Sequence[BlockLifetime]) -> list[int]:
    def rank(i: int) -> tuple[int, int, int]:
        block = blocks[i]
        return -block.nbytes, block.first - block.last, block.first

    return sorted(range(len(blocks)), key=rank)


def _by_lifetime(blocks: Sequence[BlockLifetime]) -> list[int]:
    def rank(i: int) -> tuple[int, int]:
        return blocks[i].first - blocks[i].last, -blocks[i].nbytes

    return sorted(range(len(blocks)), key=rank)


def _placed(
    blocks: Sequence[BlockLifetime], order: Sequence[int], known: Sequence[int] = (), begin: int = 0
) -> list[int]:
    """Place blocks in this order, each into the smallest hole that fits.

    Those before `begin` stay where they are in `known`.
    """
    placed = _Placed(len(blocks))
    offsets = [0] * len(blocks)
    for i in order[:begin]:
        offsets[i] = known[i]
        if blocks[i].nbytes:
            placed.keep(blocks[i], known[i])
    for i in order[begin:]:
        if blocks[i].nbytes:
            offsets[i] = placed.add(blocks[i])
    return offsets


class _Placed:
    """Blocks that have offsets, as arrays: a few passes find those alive with another one."""

    def __init__(self, room: int) -> None:
        self._table = np.zeros((4, room), np.int64)  # first, last, offset, end
        self._count = 0

    def add(self, block: BlockLifetime) -> int:
        first, last, offset, end = self._table[:, : self._count]
        alive = np.flatnonzero((first <= block.last) & (last >= block.first))
        place = _smallest_hole(offset[alive], end[alive], block.nbytes)
        self.keep(block, place)
        return place

    def keep(self, block: BlockLifetime, place: int) -> None:
        self._table[:, self._count] = block.first, block.last, place, place + block.nbytes
        self._count += 1


def _smallest_hole(offsets: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], nbytes: int) -> int:
    """Return the begin of the smallest hole between occupied ranges that fits; or their end."""
    if not len(offsets):
        return 0
    order = offsets.argsort(kind="stable")
    reach = np.maximum.accumulate(ends[order])
    begins = np.concatenate((np.zeros(1, np.int64), reach[:-1]))
    room = offsets[order] - begins
    fitting = np.flatnonzero(room >= nbytes)
    if not len(fitting):
        return int(reach[-1])
    return int(begins[fitting[room[fitting].argmin()]])


# ---- by time -------------------------------------------------------------------------------------


def best_fit_by_time(blocks: Sequence[BlockLifetime]) -> list[int]:
    """Place in the order of first steps, of one step the largest first; free after the last."""
    offsets = [0] * len(blocks)
    holes: list[tuple[int, int]] = []  # (offset, end), in order, never adjacent
    top = 0
    going = sorted(range(len(blocks)), key=lambda i: blocks[i].last)
    gone = 0
    for i in sorted(range(len(blocks)), key=lambda i: (blocks[i].first, -blocks[i].nbytes)):
        while gone < len(going) and blocks[going[gone]].last < blocks[i].first:
            block = blocks[going[gone]]
            top = _freed(holes, top, offsets[going[gone]], block.nbytes)
            gone += 1
        if blocks[i].nbytes:
            offsets[i], top = _taken(holes, top, blocks[i].nbytes)
    return offsets


def _taken(holes: list[tuple[int, int]], top: int, nbytes: int) -> tuple[int, int]:
    """Use the smallest hole that fits, else the top; return the offset and the new top."""
    fitting = [(end - start, at) for at, (start, end) in enumerate(holes) if end - start >= nbytes]
    if not fitting:
        return top, top + nbytes
    _, at = min(fitting)
    start, end = holes[at]
    holes[at : at + 1] = [(start + nbytes, end)] if end - start > nbytes else []
    return start, top


def _freed(holes: list[tuple[int, int]], top: int, offset: int, nbytes: int) -> int:
    """Free a range and merge it with adjacent holes; return the new top."""
    if not nbytes:
        return top
    start, end = offset, offset + nbytes
    at = next((at for at, hole in enumerate(holes) if hole[0] > offset), len(holes))
    if at < len(holes) and holes[at][0] == end:
        end = holes.pop(at)[1]
    if at and holes[at - 1][1] == start:
        at -= 1
        start = holes.pop(at)[0]
    if end == top:
        return start
    holes.insert(at, (start, end))
    return top


# ---- exactly -------------------------------------------------------------------------------------


def exact(blocks: Sequence[BlockLifetime]) -> list[int]:
    """Search all layouts in which no block can be lowered, in the order of offsets.

    They include a layout of minimal peak: lower its blocks, the lowest first. The search ends at
    the lower bound, or after `EXACT_BRANCHES` branches with its best layout.
    """
    if len(blocks) > EXACT_LIMIT:
        accepted = f"{EXACT_LIMIT} values or fewer, not {len(blocks)}"
        raise ConfigError(f"invalid strategy 'exact': expected {accepted}")
    start = min(
        (greedy_by_size(blocks), best_fit_by_time(blocks)), key=lambda o: peak_of(blocks, o)
    )
    search = _Search(blocks, start)
    search.descend([i for i in _by_size(blocks) if blocks[i].nbytes], 0, 0)
    return search.best


class _Search:
    def __init__(self, blocks: Sequence[BlockLifetime], start: list[int]) -> None:
        self._blocks = blocks
        self._bound = lower_bound(blocks)
        self._placed: list[tuple[BlockLifetime, int]] = []
        self._offsets = [0] * len(blocks)
        self._branches = EXACT_BRANCHES
        self.best = start
        self._lowest = peak_of(blocks, start)

    def descend(self, left: list[int], floor: int, peak: int) -> None:
        """Place each of `left` next, at `floor` or above."""
        if not left:
            self.best, self._lowest = list(self._offsets), peak
            return
        for i in left:
            block = self._blocks[i]
            place = self._lowest_place(block)
            end = place + block.nbytes
            if place < floor or end >= self._lowest:
                continue
            self._branches -= 1
            if self._branches < 0 or self._lowest == self._bound:
                return
            self._offsets[i] = place
            self._placed.append((block, end))
            self.descend([other for other in left if other != i], place, max(peak, end))
            self._placed.pop()

    def _lowest_place(self, block: BlockLifetime) -> int:
        """Return the highest end of blocks alive with it: later blocks do not lie lower."""
        ends = (e for o, e in self._placed if o.first <= block.last and o.last >= block.first)
        return max(ends, default=0)


STRATEGIES: dict[str, Callable[[Sequence[BlockLifetime]], list[int]]] = {
    "greedy_by_size": greedy_by_size,
    "greedy_by_lifetime": greedy_by_lifetime,
    "best_fit_by_time": best_fit_by_time,
    "hill_climbing": hill_climbing,
    "exact": exact,
}

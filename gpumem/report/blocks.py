"""The blocks of a trace as a page draws them, with their owners and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpumem.errors import TraceError
from gpumem.traces import ALLOC, Trace
from gpumem.traces.groups import groups_of

MAX_BLOCKS = 1 << 20
"""Maximum number of blocks that a page shows one by one; smaller ones are only in the sums."""
MAX_OWNERS = 1 << 12
"""Maximum number of owners that a page names; those with the fewest bytes become one."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Allocations and completed frees of blocks that have bytes.

    Attributes
    ----------
    moving : ndarray of int64, shape (moves,)
        Numbers of those events in the trace.
    block : ndarray of int64, shape (moves,)
        Which block each is about, by the order of the allocations.
    is_alloc : ndarray of bool, shape (moves,)
    allocation : ndarray of int64, shape (blocks,)
        Which of the trace's allocations, empty ones included, each block is.
    size : ndarray of int64, shape (blocks,)
    freed : ndarray of bool, shape (blocks,)
    """

    moving: NDArray[np.int64]
    block: NDArray[np.int64]
    is_alloc: NDArray[np.bool_]
    allocation: NDArray[np.int64]
    size: NDArray[np.int64]
    freed: NDArray[np.bool_]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return int(self.size.size)

    def largest(self, count: int) -> NDArray[np.bool_]:
        """Mark the `count` largest blocks, the earlier of two alike."""
        kept = np.ones(self.count, np.bool_)
        if self.count > count:
            kept[np.argsort(-self.size, kind="stable")[count:]] = False
        return kept


def blocks_of(trace: Trace) -> BlockTable:
    """Match the events of a trace with its blocks."""
    moving = trace.moving()
    begin, end = trace.lives()
    allocation = np.flatnonzero(trace.size[begin] > 0)
    begin, end = begin[allocation], end[allocation]
    freed = end < trace.events
    number = np.arange(begin.size)
    block = np.zeros(trace.events, np.int64)  # by event
    block[begin], block[end[freed]] = number, number[freed]
    return BlockTable(
        moving=moving,
        block=block[moving],
        is_alloc=trace.action[moving] == ALLOC,
        allocation=allocation,
        size=trace.size[begin],
        freed=freed,
    )


def owners_of(trace: Trace, blocks: BlockTable) -> tuple[NDArray[np.int64], list[str], bool]:
    """Find the owner of each block.

    Returns
    -------
    owner : ndarray of int64, shape (blocks,)
    names : list of str
        By number; of too many, the last one stands for those with the fewest bytes.
    named : bool
        Whether the log names owners. If not, all blocks of one size have one owner, because a line
        of a program usually allocates one size. If there are too many sizes, blocks are grouped by
        powers of two.
    """
    groups = groups_of(trace)
    if groups is not None:
        owner, names = groups.of[blocks.allocation], [*groups.names]
    else:
        sizes, owner = np.unique(blocks.size, return_inverse=True)
        names = [f"{size:,} bytes" for size in sizes.tolist()]
        if len(names) > MAX_OWNERS:  # nearly every block has its own size: use powers of two
            powers = np.floor(np.log2(sizes)).astype(np.int64)
            owner = powers[owner]
            names = [f"{1 << n:,} to {2 << n:,} bytes" for n in range(int(powers.max()) + 1)]
    if len(names) > MAX_OWNERS:
        total = np.bincount(owner, blocks.size.astype(np.float64), len(names))
        kept = np.argsort(-total, kind="stable")[: MAX_OWNERS - 1]
        number = np.full(len(names), MAX_OWNERS - 1)
        number[kept] = np.arange(kept.size)
        owner = number[owner]
        names = [names[old] for old in kept.tolist()] + [f"{len(names) - kept.size:,} others"]
    return owner, names, groups is not None


# ---- addresses as they are drawn -----------------------------------------------------------------


_MIN_GAP = 2 << 20
_GAP_SHARE = 64  # a gap is drawn at most as wide as the used bytes divided by this


class Drawn(NamedTuple):
    """Where blocks are drawn.

    Attributes
    ----------
    offset : ndarray of int64, shape (blocks,)
        Place of each block in the drawing, in bytes from 0.
    ranges : list of (int, int, int)
        Address, offset and bytes of each range that was used, in order.
    """

    offset: NDArray[np.int64]
    ranges: list[tuple[int, int, int]]


def draw_together(address: NDArray[np.uint64], nbytes: NDArray[np.int64]) -> Drawn:
    """Close wide gaps between addresses, so that the used ranges are visible.

    Parameters
    ----------
    address : ndarray of uint64, shape (blocks,)
    nbytes : ndarray of int64, shape (blocks,)

    Raises
    ------
    TraceError
        The used ranges and the gaps have 2**63 bytes or more.

    Examples
    --------
    >>> import numpy as np
    >>> draw_together(np.array([1 << 40, 4096], np.uint64), np.array([512, 512])).ranges
    [(4096, 0, 512), (1099511627776, 2097664, 512)]
    """
    if not address.size:
        return Drawn(np.empty(0, np.int64), [])
    order = np.argsort(address, kind="stable")
    begin = address[order]
    # No block ends after the last address.
    to_last = np.uint64((1 << 64) - 1) - begin
    end = np.maximum.accumulate(begin + np.minimum(nbytes[order].astype(np.uint64), to_last))
    gap = np.zeros(begin.size, np.uint64)
    apart = begin[1:] > end[:-1]
    gap[1:][apart] = (begin[1:] - end[:-1])[apart]
    used = int(end[-1] - begin[0]) - int(gap.sum())
    widest = max(_MIN_GAP, used // _GAP_SHARE)
    starts = np.flatnonzero(np.concatenate([[True], gap[1:] > widest]))

    ranges: list[tuple[int, int, int]] = []
    place = 0
    stops = np.append(starts[1:], begin.size)
    offset = np.empty(begin.size, np.int64)
    for first, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        base, extent = int(begin[first]), int(end[stop - 1] - begin[first])
        if place + extent >= 1 << 63:
            raise TraceError(f"the blocks use {place + extent} bytes of addresses")
        offset[first:stop] = (begin[first:stop] - np.uint64(base)).astype(np.int64) + place
        ranges.append((base, place, extent))
        place += extent + widest
    drawn = np.empty_like(offset)
    drawn[order] = offset
    return Drawn(drawn, ranges)

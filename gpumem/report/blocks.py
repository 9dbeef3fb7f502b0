"""A trace as blocks: what a page draws, and the figures that stand above it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpumem.traces.trace import ALLOC, FREE_REQUESTED, UNKNOWN_BLOCK, Trace

__all__ = ["MOST_BLOCKS", "BlockTable", "blocks_of"]

MOST_BLOCKS = 1 << 20
"""Most blocks that a page holds one by one; beyond, the smallest are only part of the sums."""
MOST_OWNERS = 1 << 12
"""Most owners that a page tells apart; beyond, those of the fewest bytes are one."""


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
    time_us : ndarray of int64, shape (moves,)
    allocation : ndarray of int64, shape (blocks,)
        Which of the trace's allocations, empty ones included, each block is.
    size : ndarray of int64, shape (blocks,)
    stream : ndarray of int64, shape (blocks,)
    freed : ndarray of bool, shape (blocks,)
    """

    moving: NDArray[np.int64]
    block: NDArray[np.int64]
    is_alloc: NDArray[np.bool_]
    time_us: NDArray[np.int64]
    allocation: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    freed: NDArray[np.bool_]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return int(self.size.size)

    def live(self) -> NDArray[np.int64]:
        """Give the bytes live after each move."""
        live: NDArray[np.int64] = np.cumsum(
            np.where(self.is_alloc, self.size[self.block], -self.size[self.block])
        )
        return live

    def largest(self, most: int) -> NDArray[np.bool_]:
        """Mark the `most` largest blocks, the earlier of two alike."""
        kept = np.ones(self.count, np.bool_)
        if self.count > most:
            kept[np.argsort(-self.size, kind="stable")[most:]] = False
        return kept


def blocks_of(trace: Trace) -> BlockTable:
    """Sort out which events of a trace are about which block."""
    moves = (trace.action != FREE_REQUESTED) & (trace.block != UNKNOWN_BLOCK) & (trace.size > 0)
    moving = np.flatnonzero(moves)
    is_alloc = trace.action[moving] == ALLOC
    ordinal = np.cumsum(is_alloc) - 1
    # A number may be given out again: side by side, each free stands behind its allocation.
    order = np.argsort(trace.block[moving], kind="stable")
    block = np.where(is_alloc, ordinal, 0)
    sorted_block = block[order]
    frees = np.flatnonzero(~is_alloc[order])
    sorted_block[frees] = sorted_block[frees - 1]
    block[order] = sorted_block
    begun = moving[is_alloc]
    freed = np.zeros(begun.size, np.bool_)
    freed[block[~is_alloc]] = True
    return BlockTable(
        moving=moving,
        block=block,
        is_alloc=is_alloc,
        time_us=trace.time_us[moving],
        allocation=(np.cumsum(trace.action == ALLOC) - 1)[begun],
        size=trace.size[begun],
        stream=trace.stream[begun].astype(np.int64),
        freed=freed,
    )


def owners_of(trace: Trace, blocks: BlockTable) -> tuple[NDArray[np.int64], list[str], bool]:
    """Say who owns each block.

    Returns
    -------
    owner : ndarray of int64, shape (blocks,)
    names : list of str
        By number; the fewest bytes are together under the last, if there are too many.
    named : bool
        Whether the log named anybody. If not, blocks of exactly one size are one owner: what one
        place in a program allocates again and again is mostly of one size. Where sizes are too
        many, those between two powers of two are.
    """
    details = trace.details
    names: list[str]
    named = details is not None and any(details.owners)
    if named and details is not None:
        owner = details.owner[blocks.allocation].astype(np.int64)
        names = [name or "unnamed" for name in details.owners]
    else:
        sizes, owner = np.unique(blocks.size, return_inverse=True)
        names = [f"{size:,} bytes" for size in sizes.tolist()]
        if len(names) > MOST_OWNERS:  # hardly two blocks are alike: powers of two
            powers = np.floor(np.log2(sizes)).astype(np.int64)
            owner = powers[owner]
            names = [f"{1 << n:,} to {2 << n:,} bytes" for n in range(int(powers.max()) + 1)]
    if len(names) > MOST_OWNERS:
        total = np.bincount(owner, blocks.size.astype(np.float64), len(names))
        kept = np.argsort(-total, kind="stable")[: MOST_OWNERS - 1]
        number = np.full(len(names), MOST_OWNERS - 1)
        number[kept] = np.arange(kept.size)
        owner = number[owner]
        names = [names[old] for old in kept.tolist()] + [f"{len(names) - kept.size:,} others"]
    return owner, names, named

"""Numbers of blocks of a cache, over one virtual tensor: block 7 is row 7.

The pool decides which rows have memory. It never touches bytes and queues no work: its engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

import gpumem

Numbers: TypeAlias = npt.NDArray[np.int64]


class BlockPool:
    """Allocates blocks so that whole pages become free. One thread at a time uses it.

    A *group* is the blocks that fill a whole number of pages. Groups get memory by one commit for
    each run of groups side by side. A group without a block loses its memory, after the work that
    is queued on the tensor's stream. A block has a count of references, so that requests with the
    same beginning share blocks.

    Parameters
    ----------
    tensor : gpumem.VirtualTensor
        Nothing else commits or releases its rows.

    Attributes
    ----------
    tensor : gpumem.VirtualTensor
    references : ndarray of int32
        The count of each block; 0: it is free.
    group_blocks : int
        Blocks of a group.
    """

    def __init__(self, tensor: gpumem.VirtualTensor) -> None:
        self.tensor = tensor
        self.references = np.zeros(len(tensor), np.int32)
        pages = tensor.page_nbytes
        self.group_blocks = min(pages // math.gcd(pages, tensor.row_nbytes), len(tensor))
        self._first = np.arange(0, len(tensor), self.group_blocks)  # blocks, one of each group
        self._sizes = np.diff(self._first, append=len(tensor))
        self._committed = np.zeros(len(self._first), bool)

    @property
    def live(self) -> int:
        """Blocks with references."""
        return int(np.count_nonzero(self.references))

    @property
    def floor_nbytes(self) -> int:
        """Bytes of the pages that the live blocks would fill, if they lay side by side."""
        return -(-self.live * self.tensor.row_nbytes // self.tensor.page_nbytes) * (
            self.tensor.page_nbytes
        )

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, count: int, near: Sequence[int] = ()) -> Numbers:
        """Return the numbers of `count` blocks, with one reference each and arbitrary bytes.

        The blocks of a sequence end together, so they lie together: first those in the groups of
        `near`, the sequence's other blocks; then empty groups, as many as are filled; then the
        lowest groups that are begun. If memory for empty groups is refused, begun groups come
        first.

        Raises
        ------
        gpumem.OutOfMemoryError
            There are fewer blocks, or there is no memory for more; nothing is changed.
        """
        if count > len(self.references) - self.live:
            raise gpumem.OutOfMemoryError(
                f"{count} blocks are requested: {self.live} of {len(self.references)} are live"
            )
        beside = np.unique(np.asarray(near, np.int64) // self.group_blocks)
        left = count - int((self._sizes - self._live_in_groups())[beside].sum())
        try:
            return self._allocate_in(self._order(beside, left), count)
        except gpumem.OutOfMemoryError:
            return self._allocate_in(self._order(beside, 0), count)

    def _order(self, beside: Numbers, left: int) -> Numbers:
        """Return groups in the order in which blocks are allocated; `left`: not in `beside`."""
        live = self._live_in_groups()
        live[beside] = -1
        begun, empty = np.flatnonzero(live > 0), np.flatnonzero(live == 0)
        # Groups with memory come first: they are spare after a failed release.
        empty = empty[np.argsort(~self._committed[empty], kind="stable")]
        filled = max(left, 0) // self.group_blocks
        return np.concatenate([beside, empty[:filled], begun, empty[filled:]])

    def _allocate_in(self, groups: Numbers, count: int) -> Numbers:
        blocks = self._blocks_of(groups)
        found = blocks[self.references[blocks] == 0][:count]
        bare = np.unique(found // self.group_blocks)
        bare = bare[~self._committed[bare]]
        runs = self._runs(bare)
        for done, run in enumerate(runs):
            try:
                self.tensor.commit(*run)
            except BaseException:
                for earlier in runs[:done]:
                    self.tensor.release(*earlier)
                raise
        self._committed[bare] = True
        self.references[found] = 1
        return found

    def share(self, blocks: Sequence[int] | Numbers) -> None:
        """Add a reference to each of some live blocks."""
        self._count(blocks, 1)

    def free(self, blocks: Sequence[int] | Numbers) -> None:
        """Drop a reference of each block; groups that have no block left lose their memory.

        Raises
        ------
        ValueError
            A block has fewer references; nothing is changed.
        gpumem.errors.InUseError
            A tensor of rows that would lose their memory is alive; the group keeps it.
        """
        self._count(blocks, -1)
        self._release_idle()

    def compact(self, copy: Callable[[Numbers, Numbers], object]) -> dict[int, int]:
        """Move live blocks into as few groups as they fit into: the emptiest into the fullest.

        Parameters
        ----------
        copy : callable
            ``copy(origins, targets)`` copies rows, on the streams that use them.

        Returns
        -------
        dict of int to int
            The new number of each block that moved.
        """
        live = self._live_in_groups()
        order = np.argsort(-live, kind="stable")
        needed = int(np.searchsorted(np.cumsum(self._sizes[order]), self.live)) + 1
        kept, emptied = (self._blocks_of(part) for part in (order[:needed], order[needed:]))
        origins = emptied[self.references[emptied] > 0]
        targets = kept[self.references[kept] == 0]
        targets = targets[self._committed[targets // self.group_blocks]][: len(origins)]
        if len(origins):
            copy(origins, targets)
            self.references[targets] = self.references[origins]
            self.references[origins] = 0
            self._release_idle()
        return dict(zip(origins.tolist(), targets.tolist(), strict=True))

    # ---- groups ----------------------------------------------------------------------------------

    def _count(self, blocks: Sequence[int] | Numbers, change: int) -> None:
        numbers, times = np.unique(np.asarray(blocks, np.int64), return_counts=True)
        after = self.references[numbers] + change * times
        wrong = (self.references[numbers] == 0) | (after < 0)
        if wrong.any():
            block = numbers[wrong][0]
            raise ValueError(f"block {block} has {self.references[block]} references")
        self.references[numbers] = after

    def _live_in_groups(self) -> Numbers:
        return np.add.reduceat(self.references > 0, self._first, dtype=np.int64)

    def _release_idle(self) -> None:
        idle = np.flatnonzero(self._committed & (self._live_in_groups() == 0))
        for first, last in self._runs(idle):
            self.tensor.release(first, last)
            self._committed[first // self.group_blocks : -(-last // self.group_blocks)] = False

    def _blocks_of(self, groups: Numbers) -> Numbers:
        blocks = (groups[:, None] * self.group_blocks + np.arange(self.group_blocks)).reshape(-1)
        return blocks[blocks < len(self.references)]

    def _runs(self, groups: Numbers) -> list[tuple[int, int]]:
        """Return the rows of groups, those side by side in one piece."""
        cuts = [0, *(np.flatnonzero(np.diff(groups) != 1) + 1), len(groups)]
        ends = self._first + self._sizes
        return [
            (int(self._first[groups[a]]), int(ends[groups[b - 1]]))
            for a, b in pairwise(cuts)
            if b > a
        ]

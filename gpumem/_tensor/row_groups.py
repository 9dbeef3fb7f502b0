"""Groups of rows that have memory in every one of several virtual tensors, or in none."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpumem._tensor.virtual import VirtualTensor, commit_if_free, release_together
from gpumem.errors import InUseError

__all__ = ["BARE", "COMING", "HELD", "RowGroups", "blocks_of_pages", "enough"]

# Of a group's memory. COMING: a thread commits its rows, and other threads leave them alone.
BARE, COMING, HELD = range(3)

Groups: TypeAlias = npt.NDArray[np.int64]


class RowGroups:
    """Numbers of groups, each of so many blocks of rows of all tensors; the last may be shorter.

    Groups share no page. Their owner has a lock around all but the commits, of which one may wait,
    and counts in `taken` the blocks of each group that are not free.
    """

    def __init__(
        self,
        tensors: tuple[VirtualTensor, ...],
        block_rows: int,
        group_blocks: int,
        capacity: int,
    ) -> None:
        self._tensors, self._group_blocks = tensors, group_blocks
        self._group_rows, self._most = group_blocks * block_rows, capacity * block_rows
        count = -(-capacity // group_blocks)
        self.memory = np.zeros(count, np.int8)
        self.sizes = np.full(count, group_blocks, np.int64)  # in blocks
        self.sizes[-1] = capacity - (count - 1) * group_blocks
        self.taken = np.zeros(count, np.int64)

    # ---- which ones ------------------------------------------------------------------------------

    def missing(self, count: int) -> int:
        """Return how many of so many blocks have no memory."""
        return count - int((self.sizes - self.taken)[self.memory == HELD].sum())

    def to_fill(self, count: int, beside: Groups) -> Groups:
        """Return groups with memory in the order in which so many blocks are best taken.

        First `beside`; then empty ones, as many as are filled; then the lowest, begun ones before
        empty ones.
        """
        held = self.memory == HELD
        beside = beside[held[beside]]
        left = count - int((self.sizes - self.taken)[beside].sum())
        held[beside] = False
        empty = np.flatnonzero(held & (self.taken == 0))
        filled = int(np.searchsorted(np.cumsum(self.sizes[empty]), left, "right"))
        begun = np.flatnonzero(held & (self.taken > 0))
        return np.concatenate([beside, empty[:filled], begun, empty[filled:]])

    def to_bring(self, count: int) -> tuple[Groups, int]:
        """Return groups that lack memory for so many blocks, and how many blocks they are short."""
        missing = self.missing(count)
        bare = np.flatnonzero(self.memory == BARE)
        groups = bare[: enough(self.sizes[bare], missing)] if missing > 0 else bare[:0]
        return groups, max(missing - int(self.sizes[groups].sum()), 0)

    def wished(self, count: int, beside: Groups) -> Groups:
        """Return more groups than `to_bring`, if so many blocks would fill them, or none."""
        if count < self._group_blocks:
            return np.empty(0, np.int64)
        held = self.memory == HELD
        room = int((self.sizes - self.taken)[beside[held[beside]]].sum())
        filled = (count - room) // self._group_blocks - int((held & (self.taken == 0)).sum())
        groups = np.flatnonzero(self.memory == BARE)[: max(filled, 0)]
        return groups if len(groups) > len(self.to_bring(count)[0]) else groups[:0]

    def idle(self, spare: int, without: Groups | tuple[()] = ()) -> Groups:
        """Return groups that have memory and, without some blocks, none; not the lowest `spare`."""
        gone = np.asarray(without, np.int64) // self._group_blocks
        taken = self.taken - np.bincount(gone, minlength=len(self.taken))
        return np.flatnonzero((self.memory == HELD) & (taken == 0))[spare:]

    # ---- memory ----------------------------------------------------------------------------------

    def commit(self, groups: Groups) -> None:
        """Give memory to COMING groups, by one commit for each tensor and groups side by side."""
        for tensor in self._tensors:
            for first, last in self._runs(groups):
                tensor.commit(first, last)

    def commit_if_free(self, groups: Groups) -> bool:
        """Do so, or tell that it is refused, without a wait; then some may have memory in part."""
        runs = self._runs(groups)
        return all(commit_if_free(each, *run) for each in self._tensors for run in runs)

    def release(self, groups: Groups) -> None:
        """Take their memory; raises InUseError or MemoryError and changes nothing."""
        if len(groups):
            release_together(self._tensors, self._runs(groups))
            self.memory[groups] = BARE

    def give_back(self, groups: Groups) -> Groups:
        """Take their memory, and return them; those with rows in a live tensor are left out.

        Without host memory for it all are; either way a later call takes it.
        """
        try:
            self.release(groups)
        except InUseError:
            if len(groups) == 1:
                return groups[:0]
            return np.concatenate([self.give_back(half) for half in np.array_split(groups, 2)])
        except MemoryError:
            return groups[:0]
        return groups

    def _runs(self, groups: Groups) -> list[tuple[int, int]]:
        """Return the rows of groups, those side by side in one piece."""
        cuts = [0, *(np.flatnonzero(np.diff(groups) != 1) + 1), len(groups)]
        rows = self._group_rows
        return [
            (int(groups[a]) * rows, min((int(groups[b - 1]) + 1) * rows, self._most))
            for a, b in pairwise(cuts)
        ]


def blocks_of_pages(tensors: tuple[VirtualTensor, ...], block_rows: int) -> int:
    """Return how many blocks of so many rows fill whole pages in every tensor."""
    sizes = (
        tensor.page_nbytes // math.gcd(tensor.page_nbytes, tensor.row_nbytes * block_rows)
        for tensor in tensors
    )
    return math.lcm(*sizes)


def enough(sizes: npt.NDArray[np.int64], count: int) -> int:
    """Return how many of the first sizes it takes for a sum of `count`; one more than all: none."""
    return int(np.searchsorted(np.cumsum(sizes), count)) + 1

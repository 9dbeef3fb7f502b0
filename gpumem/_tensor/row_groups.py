"""Groups of rows that have memory in every one of several virtual tensors, or in none."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpumem._tensor.virtual import VirtualTensor, release_together
from gpumem.errors import InUseError

__all__ = ["BARE", "COMING", "HELD", "RowGroups", "blocks_of_pages"]

# Of a group's memory. COMING: a thread commits its rows, and other threads leave them alone.
BARE, COMING, HELD = range(3)

Groups: TypeAlias = npt.NDArray[np.int64]


class RowGroups:
    """Numbers of groups, each of so many rows of all tensors; the last one may be shorter.

    Groups share no page. Their owner has a lock around all but `commit`, which may wait.
    """

    def __init__(self, tensors: tuple[VirtualTensor, ...], group_rows: int, most: int) -> None:
        self._tensors, self._group_rows, self._most = tensors, group_rows, most
        self.memory = np.zeros(-(-most // group_rows), np.int8)

    def commit(self, groups: Groups) -> None:
        """Give memory to COMING groups, by one commit for each tensor and groups side by side."""
        for tensor in self._tensors:
            for first, last in self._runs(groups):
                tensor.commit(first, last)

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

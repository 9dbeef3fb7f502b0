"""Pinned memory for saved storages of any sizes, in pieces.

A storage takes whatever is free, in several pieces, so that no step holds more than it has out at
once. All copies are on one stream: a piece may be taken again as soon as its last copy is queued.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_ALIGNMENT = 512  # bytes
_SLAB = 32 << 20  # bytes of a growth, at least
_STEPS = 8  # after so many steps that need less, slabs are released

Piece = tuple[int, int, int]
"""The number of a slab, and its first byte and that after the last."""


class HostMemory:
    """Slabs of pinned memory. The caller holds a lock, but for `free`.

    Parameters
    ----------
    make : callable
        Returns a slab of so many bytes, or None.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._slabs: dict[int, Any] = {}
        self._free: list[Piece] = []  # in order, no two next to each other
        self._freed: deque[list[Piece]] = deque()
        self._count = 0
        self.held = self.used = 0
        self._peaks: deque[int] = deque([0], _STEPS)  # of used bytes, by step

    def allocate(self, nbytes: int) -> list[Piece] | None:
        """Return pieces for so many bytes, or None where no memory can be pinned."""
        self._collect()
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        missing = nbytes - (self.held - self.used)
        if missing > 0 and not (self._grow(max(missing, _SLAB)) or self._grow(missing)):
            return None
        self.used += nbytes
        self._peaks[-1] = max(self._peaks[-1], self.used)
        found = []
        while nbytes:
            # A piece is a copy: the smallest that is large enough, else the largest.
            sizes = [last - first for _, first, last in self._free]
            i = sizes.index(min((each for each in sizes if each >= nbytes), default=max(sizes)))
            slab, first, last = self._free.pop(i)
            end = min(last, first + nbytes)
            if end < last:
                self._free.insert(i, (slab, end, last))
            found.append((slab, first, end))
            nbytes -= end - first
        return found

    def free(self, pieces: list[Piece]) -> None:
        """Free pieces; in any thread, and in the middle of another call."""
        self._freed.append(pieces)

    def views(self, pieces: list[Piece], first: int, last: int) -> Iterator[tuple[int, int, Any]]:
        """Return the parts that hold bytes of a storage: where they begin and end in it."""
        begin = 0
        for slab, start, stop in pieces:
            end = begin + stop - start
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield low, high, self._slabs[slab][start + low - begin : start + high - begin]
            begin = end

    def begin_step(self) -> None:
        """Release slabs that the last steps have not needed."""
        self._collect()
        needed = max(self._peaks) if len(self._peaks) == _STEPS else self.held
        self._peaks.append(self.used)
        for piece in [
            each for each in self._free if each[2] - each[1] == len(self._slabs[each[0]])
        ]:
            nbytes = piece[2] - piece[1]
            if self.held - nbytes >= needed:
                self._free.remove(piece)
                del self._slabs[piece[0]]
                self.held -= nbytes

    def _grow(self, nbytes: int) -> bool:
        slab = self._make(nbytes)
        if slab is None:
            return False
        self._count += 1
        self._slabs[self._count] = slab
        self.held += nbytes
        self._add((self._count, 0, nbytes))
        return True

    def _collect(self) -> None:
        while self._freed:
            for piece in self._freed.popleft():
                self.used -= piece[2] - piece[1]
                self._add(piece)

    def _add(self, piece: Piece) -> None:
        insort(self._free, piece)
        i = self._free.index(piece)
        for left in (i, i - 1):  # joins the one after it, then the one before it
            if 0 <= left < len(self._free) - 1:
                a, b = self._free[left : left + 2]
                if a[0] == b[0] and a[2] == b[1]:
                    self._free[left : left + 2] = [(a[0], a[1], b[2])]

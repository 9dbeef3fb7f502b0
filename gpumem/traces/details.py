"""What a log may tell of a run beyond sizes and times: places, owners, memory held, failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Curve", "Details"]


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
        """The most bytes."""
        return int(np.max(self.nbytes, initial=0))

    def changes(self) -> Curve:
        """Leave out the events at which nothing changes."""
        kept = np.flatnonzero(np.diff(self.nbytes, prepend=0))
        return Curve(self.at[kept], self.nbytes[kept])

    def by_event(self, events: int) -> NDArray[np.int64]:
        """Give the bytes held at each of so many events."""
        places = np.searchsorted(self.at, np.arange(events), side="right")
        return np.concatenate([np.zeros(1, np.int64), self.nbytes])[places]


@dataclass(frozen=True, eq=False)
class Details:
    """What a log told beside the events themselves; the first two arrays have a row per allocation.

    Attributes
    ----------
    address : ndarray of uint64, shape (allocs,)
        Where each block lay, in the order of the allocations.
    owner : ndarray of int32, shape (allocs,)
        Who asked, as an index of `owners`.
    owners : tuple of str
        Tags, places in the program or names; "" where the log names nobody.
    streams : tuple of str
        What to call each stream, by number.
    held : Curve or None
        Bytes held from the driver since the log began; None if the log does not tell.
    failures : tuple of (int, int)
        Events before each refused allocation, and the bytes that it asked for.
    """

    address: NDArray[np.uint64]
    owner: NDArray[np.int32]
    owners: tuple[str, ...]
    streams: tuple[str, ...]
    held: Curve | None = None
    failures: tuple[tuple[int, int], ...] = ()

"""Addresses as they are drawn: the ranges that were used, one after the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Drawn", "draw_together"]

_LEAST_GAP = 2 << 20
_GAP_SHARE = 64  # a gap is drawn at most as wide as this part of all that is used


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
    """Close wide gaps between addresses, so that what is used can be seen.

    Parameters
    ----------
    address : ndarray of uint64, shape (blocks,)
    nbytes : ndarray of int64, shape (blocks,)

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
    # No block ends behind the last address.
    room = np.uint64((1 << 64) - 1) - begin
    end = np.maximum.accumulate(begin + np.minimum(nbytes[order].astype(np.uint64), room))
    gap = np.zeros(begin.size, np.uint64)
    behind = begin[1:] > end[:-1]
    gap[1:][behind] = (begin[1:] - end[:-1])[behind]
    used = int(end[-1] - begin[0]) - int(gap.sum())
    widest = max(_LEAST_GAP, used // _GAP_SHARE)
    starts = np.flatnonzero(np.concatenate([[True], gap[1:] > widest]))

    ranges: list[tuple[int, int, int]] = []
    place = 0
    stops = np.append(starts[1:], begin.size)
    offset = np.empty(begin.size, np.int64)
    for first, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        base, extent = int(begin[first]), int(end[stop - 1] - begin[first])
        offset[first:stop] = (begin[first:stop] - np.uint64(base)).astype(np.int64) + place
        ranges.append((base, place, extent))
        place += extent + widest
    drawn = np.empty_like(offset)
    drawn[order] = offset
    return Drawn(drawn, ranges)

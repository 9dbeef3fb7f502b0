"""Models of the memory that PyTorch's caching allocator and the driver alone reserve for a trace.

They place blocks at numbers, use no memory of a device, and run in well under a second for 100 000
events. A replay is compared with their figures.

PyTorch's native CUDA allocator, as modelled (its defaults; ``expandable_segments`` off):

- sizes round up to 512 B; a block belongs to its stream and to the small (<= 1 MiB) or the
  large pool of that stream, and neither crosses over;
- a pool uses the smallest free block that fits, lowest address first, and only without one
  reserves a segment: 2 MiB for small blocks, 20 MiB for blocks below 10 MiB, for others the
  size rounded up to 2 MiB;
- a block is split if the remainder has at least 512 B in the small pool, or more than 1 MiB in
  the large one;
- free neighbours within a segment become one block; segments are never released (the memory of
  the model is unlimited, so the allocator is never forced to).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from gpumem.replay._heap import BestFitHeap
from gpumem.traces import ALLOC, Curve, Trace

MIB = 1 << 20

GRAIN = 512
"""Sizes are rounded up to this, in bytes, by PyTorch and by the driver."""
MAX_SMALL = 1 * MIB
"""PyTorch: the largest block of the small pool."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_SEGMENT_BELOW = 10 * MIB
"""PyTorch: blocks below this share a `LARGE_SEGMENT`."""
SEGMENT_GRAIN = 2 * MIB
"""PyTorch: segments of a single large block are rounded up to this."""
DRIVER_GRANULARITY = 2 * MIB
"""The unit in which a CUDA driver reserves physical memory."""


def caching_allocator_reserved(trace: Trace) -> int:
    """Return the peak of the bytes that PyTorch's caching allocator would reserve for `trace`.

    Parameters
    ----------
    trace : Trace
        The run; blocks are freed where their free completes.

    Returns
    -------
    int
        Peak bytes held from the driver in segments (PyTorch's ``reserved_bytes.all.peak``).

    Examples
    --------
    >>> trace = Trace(action=[0, 0], block=[0, 1], size=[100, 3 << 20],
    ...               stream=[0, 0], time_us=[0, 1])
    >>> caching_allocator_reserved(trace) >> 20  # one segment of 2 MiB and one of 20
    22
    """
    return caching_allocator_curve(trace).peak


def caching_allocator_curve(trace: Trace) -> Curve:
    """Return the bytes that PyTorch's caching allocator would reserve at each event of `trace`."""
    pools: dict[tuple[int, bool], BestFitHeap] = {}
    home: dict[int, tuple[BestFitHeap, int]] = {}  # by block number, while it lives
    reserved = 0  # no memory is ever released
    held = array("q")
    for is_alloc, number, size, stream in _allocs_and_frees(trace):
        if not is_alloc:
            heap, block = home.pop(number)
            heap.free(block)
            held.append(reserved)
            continue
        rounded = _round_up(size, GRAIN)
        small = rounded <= MAX_SMALL
        pool = pools.get((stream, small))
        if pool is None:
            pool = pools[stream, small] = BestFitHeap(GRAIN if small else MAX_SMALL + GRAIN)
        block = pool.allocate(rounded)
        if block < 0:
            segment = _torch_segment(rounded)
            block = pool.grow(rounded, segment)
            reserved += segment
        home[number] = pool, block
        held.append(reserved)
    return _curve(trace, held)


def plain_driver_reserved(trace: Trace, *, granularity: int = DRIVER_GRANULARITY) -> int:
    """Return the peak of reserved bytes if every block of `trace` were a separate driver call.

    The driver serves blocks of up to half a granule from granules that they share, in steps of
    512 B, and every larger block from whole granules of its own; it releases empty granules.
    This was measured with ``cuMemAlloc`` on an H200 (driver 580), where 1 MiB costs 1 MiB, one
    byte more costs 2 MiB, and one byte above 2 MiB costs 4 MiB. Streams make no difference.

    Parameters
    ----------
    trace : Trace
        The run; blocks are freed where their free completes.
    granularity : int, optional
        Bytes of the driver's physical unit, an even multiple of 512; 2 MiB on today's GPUs.

    Returns
    -------
    int
        Peak bytes held.

    Raises
    ------
    ValueError
        A granularity that is not a positive even multiple of 512.

    Examples
    --------
    >>> trace = Trace(action=[0, 0], block=[0, 1], size=[100, 3 << 20],
    ...               stream=[0, 0], time_us=[0, 1])
    >>> plain_driver_reserved(trace) >> 20  # a shared 2 MiB granule, and two of its own
    6
    """
    return plain_driver_curve(trace, granularity=granularity).peak


def plain_driver_curve(trace: Trace, *, granularity: int = DRIVER_GRANULARITY) -> Curve:
    """Return the bytes that driver calls would reserve at each event: `plain_driver_reserved`."""
    if granularity <= 0 or granularity % (2 * GRAIN):
        raise ValueError(
            f"granularity is {granularity}, expected a positive multiple of {2 * GRAIN} bytes"
        )
    shared = BestFitHeap(GRAIN, releases=True)
    home: dict[int, int] = {}  # by block number: its block, or the bytes of its granules
    own = 0
    limit = granularity // 2
    held = array("q")
    for is_alloc, number, size, _ in _allocs_and_frees(trace):
        if not is_alloc and size <= limit:
            shared.free(home.pop(number))
        elif not is_alloc:
            own -= home.pop(number)
        elif size <= limit:
            rounded = _round_up(size, GRAIN)
            block = shared.allocate(rounded)
            home[number] = shared.grow(rounded, granularity) if block < 0 else block
        else:
            home[number] = _round_up(size, granularity)
            own += home[number]
        held.append(own + shared.reserved)
    return _curve(trace, held)


def _allocs_and_frees(trace: Trace) -> Iterator[tuple[int, ...]]:
    """Iterate over allocations and frees, as (is it an allocation, block number, size, stream)."""
    columns = (trace.action == ALLOC, trace.block, trace.size, trace.stream)
    return zip(*(column[trace.moving()].tolist() for column in columns), strict=True)


def _curve(trace: Trace, held: array[int]) -> Curve:
    """Make a curve of the bytes held after each allocation and free."""
    return Curve(trace.moving(), np.array(held, dtype=np.int64)).changes()


def _torch_segment(size: int) -> int:
    """Return the bytes of the segment that PyTorch reserves if no free block fits `size`."""
    if size <= MAX_SMALL:
        return SMALL_SEGMENT
    if size < LARGE_SEGMENT_BELOW:
        return LARGE_SEGMENT
    return _round_up(size, SEGMENT_GRAIN)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

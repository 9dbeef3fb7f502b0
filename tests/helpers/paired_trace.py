"""A trace of blocks that are each freed before the next one is allocated."""

import numpy as np

from gpumem.traces import Trace


def trace_of_pairs(pairs: int) -> Trace:
    """Return a trace of so many allocations of 4 KiB, each followed by its free."""
    return Trace(
        action=np.tile([0, 2], pairs),
        block=np.repeat(np.arange(pairs), 2),
        size=np.full(2 * pairs, 4096),
        stream=np.zeros(2 * pairs, int),
        time_us=np.arange(2 * pairs),
    )

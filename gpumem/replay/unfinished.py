"""How much memory unfinished work withholds from other streams, whatever the allocator does."""

from __future__ import annotations

from collections import deque

from gpumem.traces import ALLOC, FREE_COMPLETED, Trace


def peak_live_or_unfinished(trace: Trace, lag_us: int) -> int:
    """Return the peak of bytes that are live, or freed on a stream before its work has finished.

    Work of a stream finishes `lag_us` after it was queued. A stream reuses its own unfinished
    memory, the memory freed last first, which keeps the bytes withheld from other streams minimal.
    So no allocator that keeps streams apart without waits needs less.

    Parameters
    ----------
    trace : Trace
        The allocations and frees.
    lag_us : int
        Microseconds of the trace's time.

    Examples
    --------
    >>> trace = Trace(action=[0, 2, 0, 0], block=[0, 0, 1, 2], size=[100, 100, 30, 60],
    ...               stream=[0, 0, 0, 1], time_us=[0, 10, 11, 12])
    >>> peak_live_or_unfinished(trace, 5), peak_live_or_unfinished(trace, 0)
    (160, 100)
    """
    streams = [_Unfinished() for _ in range(trace.streams)]
    sizes: dict[int, int] = {}
    live = peak = 0
    columns = (trace.action, trace.block, trace.size, trace.stream, trace.time_us)
    for action, block, size, stream, now in zip(*(c.tolist() for c in columns), strict=True):
        if block < 0:
            continue  # allocated before the recording began, as in a replay
        if action == ALLOC:
            sizes[block] = size
            live += size
            streams[stream].reuse(size)
            for other in streams:
                other.finish(now - lag_us)
            peak = max(peak, live + sum(other.nbytes for other in streams))
        elif action == FREE_COMPLETED:
            live -= sizes[block]
            streams[stream].free(sizes.pop(block), now)
    return peak


class _Unfinished:
    """Blocks freed on one stream and not used again, in the order of the frees."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.freed: deque[tuple[int, int]] = deque()  # microseconds, bytes

    def free(self, nbytes: int, now: int) -> None:
        self.freed.append((now, nbytes))
        self.nbytes += nbytes

    def finish(self, until: int) -> None:
        """Drop the bytes that were freed so early that their work has finished."""
        while self.freed and self.freed[0][0] <= until:
            self.nbytes -= self.freed.popleft()[1]

    def reuse(self, nbytes: int) -> None:
        while nbytes and self.freed:
            at, freed = self.freed.pop()
            used = min(nbytes, freed)
            nbytes -= used
            self.nbytes -= used
            if freed > used:
                self.freed.append((at, freed - used))

"""TrackAdaptor: the live blocks of a resource, and where they were allocated."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._support.sizes import exact_size
from gpumem.adaptors._adaptor import Adaptor
from gpumem.debugging import OutstandingBlock, Site


@dataclass(frozen=True)
class TrackCounts:
    """Counters of a tracked resource, in requested bytes and in blocks.

    Attributes
    ----------
    current_bytes, current_blocks : int
        Allocated now.
    peak_bytes, peak_blocks : int
        The maximum so far.
    total_bytes, total_blocks : int
        Allocated since the start.

    Examples
    --------
    >>> import gpumem
    >>> tracked = gpumem.adaptors.track(gpumem.Arena("host"))
    >>> tracked.allocate(1000).close()
    >>> counts = tracked.counts()
    >>> counts.current_bytes, counts.peak_bytes, counts.total_blocks
    (0, 1000, 1)
    """

    current_bytes: int
    current_blocks: int
    peak_bytes: int
    peak_blocks: int
    total_bytes: int
    total_blocks: int


class TrackAdaptor(Adaptor):
    """A resource that records its live blocks, and where they were allocated.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    stacks : bool, optional
        Record each block's call stack; a few microseconds per allocation.
    name : str, optional
        Name used in error messages and reports; the upstream's by default.

    Raises
    ------
    TypeError
        `resource` is not a MemoryResource.

    Examples
    --------
    >>> import gpumem
    >>> tracked = gpumem.adaptors.track(gpumem.Arena("host"), stacks=True)
    >>> buffer = tracked.allocate(1000)
    >>> [(block.nbytes, block.stack[-1].name) for block in tracked.outstanding()]
    [(1000, '<module>')]
    """

    def __init__(
        self, resource: MemoryResource, *, stacks: bool = False, name: str | None = None
    ) -> None:
        super().__init__((resource,), name=name)
        self._stacks = stacks

    def _note(self, buffer: Buffer, persistent: bool) -> Site | None:
        if not self._stacks:
            return None
        caller = traceback.walk_stack(sys._getframe(1))
        stack = traceback.StackSummary.extract(caller, lookup_lines=False)
        stack.reverse()
        return Site(threading.get_ident(), buffer.stream.ptr, stack)

    def counts(self) -> TrackCounts:
        """Return the counters."""
        return TrackCounts(*self._counts())

    def reset_peaks(self) -> None:
        """Set the peaks to the current values."""
        self._reset_peaks()

    def outstanding(self) -> list[OutstandingBlock]:
        """Return the live blocks, the oldest first."""
        return [OutstandingBlock(*found) for found in self._live()]

    def report(self) -> str:
        """Return the live blocks as text, the largest first, each with its stack."""
        lines = []
        for block in sorted(self.outstanding(), key=lambda block: -block.nbytes):
            lines.append(f"{exact_size(block.nbytes)} at {block.ptr:#x}\n")
            lines.extend(block.stack.format() if block.stack is not None else ())
        return "".join(lines)


track = TrackAdaptor

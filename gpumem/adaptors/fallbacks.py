"""FallbackAdaptor: the first resource that has the memory serves it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._support.forks import ForkLock
from gpumem.adaptors._adaptor import Adaptor, serve_from
from gpumem.stats import ShrinkReport, Stats


class FallbackAdaptor(Adaptor):
    """Several resources of one device, tried one after another until one has the memory.

    For example a GPU's own memory, then pinned memory of the same GPU, then managed memory. The
    `memory` of a buffer is that of the resource which served it, so a buffer in pinned memory has
    NumPy views. The adaptor's own `memory` is the first resource's.

    Parameters
    ----------
    first, second, *more : MemoryResource
        Resources of one device, in the order in which they are tried. After a MemoryError the next
        one is tried; every other exception is raised. If none has the memory, the last one's error
        is raised, with the others' as notes.
    name : str, optional
        Name used in error messages and reports; the first resource's by default.

    Raises
    ------
    TypeError
        A resource is not a MemoryResource.
    ValueError
        The resources are not of one device, or one is given twice.

    Examples
    --------
    >>> import gpumem
    >>> fast = gpumem.adaptors.limit(gpumem.Arena("host"), 1000)
    >>> pinned = gpumem.Arena("host/host_accessible")
    >>> both = gpumem.adaptors.fallback(fast, pinned)
    >>> buffer = both.allocate(2000)
    >>> str(buffer.memory), both.served_by(buffer) is pinned, both.served
    ('host:0/host_accessible', True, (0, 1))
    """

    def __init__(
        self,
        first: MemoryResource,
        second: MemoryResource,
        *more: MemoryResource,
        name: str | None = None,
    ) -> None:
        resources = (first, second, *more)
        super().__init__(resources, name=name)
        for number, resource in enumerate(resources):
            if resource.memory.device != self.memory.device:
                raise ValueError(
                    f"{resource!r} is of {resource.memory.device}: the resources of a fallback are "
                    f"of one device, here {self.memory.device}"
                )
            if any(resource is other for other in resources[:number]):
                raise ValueError(f"{resource!r} is given twice")
        self._served = [0] * len(resources)
        self._lock = ForkLock()

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        refusals = []
        for number, upstream in enumerate(self.upstreams):
            try:
                buffer = serve_from(upstream, nbytes, stream, options, persistent)
            except MemoryError as error:
                refusals.append(f"before that, {upstream!r}: {error}")
                if upstream is not self.upstreams[-1]:
                    continue
                for refusal in refusals[:-1]:
                    error.add_note(refusal)
                raise
            with self._lock:
                self._served[number] += 1
            return buffer
        raise AssertionError("unreachable")

    def _note(self, buffer: Buffer, persistent: bool) -> MemoryResource:
        return buffer.resource

    def served_by(self, buffer: Buffer) -> MemoryResource:
        """Return the resource that a live buffer came from.

        Raises
        ------
        ValueError
            The buffer is not one of this adaptor's.
        ClosedError
            It is closed.
        """
        resource: MemoryResource = self._note_of(buffer)
        return resource

    @property
    def served(self) -> tuple[int, ...]:
        """Number of blocks that each resource has served here."""
        return tuple(self._served)

    @property
    def is_arena(self) -> bool:
        """Whether any of the resources sub-allocates and can be shrunk."""
        return any(upstream.is_arena for upstream in self.upstreams)

    def shrink(self) -> ShrinkReport:
        """Shrink every resource; the report has the sums of their reports."""
        reports = [upstream.shrink() for upstream in self.upstreams]
        return ShrinkReport(
            sum(report.released_bytes for report in reports),
            tuple(kept for report in reports for kept in report.retained),
        )

    def stats(self) -> Stats:
        """Return the sums of the resources' counters.

        The limit is None if one of them has none; peaks are sums of peaks, so an upper bound; the
        largest blocks are those of the resource that has the largest.
        """
        parts = [upstream.stats() for upstream in self.upstreams]
        sums = {
            each.name: sum(getattr(part, each.name) for part in parts)
            for each in fields(Stats)
            if each.name != "limit"
        }
        limits = [part.limit for part in parts if part.limit is not None]
        sums["limit"] = sum(limits) if len(limits) == len(parts) else None
        for largest in ("max_alloc_size", "largest_free"):
            sums[largest] = max(getattr(part, largest) for part in parts)
        return Stats(**sums)


fallback = FallbackAdaptor

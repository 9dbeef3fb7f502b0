"""What allocators report: statistics, shrink and out-of-memory reports, levels of a budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from gpumem._support.notebooks import html_table
from gpumem._support.out_of_memory import LimitInForce, OutOfMemoryReport
from gpumem._support.sizes import format_size

__all__ = [
    "BlockInfo",
    "BudgetLevel",
    "LimitInForce",
    "OutOfMemoryReport",
    "PoolStats",
    "RetainedRegion",
    "ShrinkReport",
    "Stats",
]


_COUNTS = (
    "num_allocs",
    "num_frees",
    "num_reserves",
    "num_extensions",
    "num_regions",
    "num_shrinkages",
    "pages_moved",
    "driver_calls",
    "moves_refused",
)  # fields of `Stats` that are no bytes


@dataclass(frozen=True, repr=False)
class Stats:
    """Counters of one arena at one moment; sizes in bytes.

    Attributes
    ----------
    limit : int
        Bytes the arena may hold; 0 is unlimited.
    in_use, max_in_use : int
        Bytes in use, padding included; the highest so far. Where several threads allocate blocks of
        up to 64 KiB, it may miss or add what moves in and out of their caches at that moment.
    requested_in_use : int
        Requested bytes in use.
    reserved, max_reserved : int
        Bytes held from the device; the highest so far.
    num_allocs, num_frees : int
        Allocations and frees since the start.
    num_reserves : int
        Of those, persistent blocks.
    num_extensions : int
        Regions added for ordinary blocks so far; with backing="virtual" pages made for them.
    num_regions : int
        Regions held now; with backing="virtual" all pages of ordinary blocks count as one.
    num_shrinkages : int
        Regions released while the arena was open; with "virtual" pages released.
    max_alloc_size : int
        The largest block so far, padding included.
    largest_free : int
        The largest free block now.
    pages_moved : int
        Physical pages moved to another address.
    driver_calls : int
        Driver calls made on behalf of this arena.
    moves_refused : int
        Pages made without a search for idle pages that could move, because `page_move_budget` was
        used up.
    suspended_bytes : int
        Bytes of live blocks that wait elsewhere while they are asleep; not those that are dropped.
    virtual : int
        Of `reserved`, bytes that virtual tensors hold; their pages in use count in `in_use` and
        `requested_in_use`, too.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> stats = arena.stats()
    >>> stats.in_use - stats.requested_in_use        # padding
    24
    """

    limit: int
    in_use: int
    requested_in_use: int
    reserved: int
    max_in_use: int
    max_reserved: int
    num_allocs: int
    num_frees: int
    num_reserves: int
    num_extensions: int
    num_regions: int
    num_shrinkages: int
    max_alloc_size: int
    largest_free: int
    pages_moved: int
    driver_calls: int
    moves_refused: int = field(default=0, kw_only=True)
    suspended_bytes: int = field(default=0, kw_only=True)
    virtual: int = field(default=0, kw_only=True)

    def __repr__(self) -> str:
        limit = f"limit {format_size(self.limit)}" if self.limit else "no limit"
        return (
            f"<gpumem.{type(self).__name__}: {format_size(self.in_use)} in use "
            f"(peak {format_size(self.max_in_use)}), {format_size(self.reserved)} reserved "
            f"(peak {format_size(self.max_reserved)}), {limit}>"
        )

    def _repr_html_(self) -> str:
        rows = {
            name: f"{value:,}" if name in _COUNTS else format_size(value)
            for name, value in asdict(self).items()
        }
        return html_table(f"gpumem.{type(self).__name__}", rows)

    @property
    def total_allocated(self) -> int:
        """ONNX Runtime's name for `reserved`."""
        return self.reserved

    def as_ort(self) -> dict[str, str]:
        """Return ONNX Runtime's keys with decimal strings; always all of them.

        Two have another meaning there: ``Limit`` is 2**63 - 1 without a limit, and
        ``NumArenaExtensions`` falls with every region or page that is released, so that it is the
        number of those that ordinary blocks have, while `num_extensions` never falls.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host", {"max_mem": 1 << 30})
        >>> ort = arena.stats().as_ort()
        >>> ort["Limit"], ort["NumAllocs"]
        ('1073741824', '0')
        """
        values = {
            "Limit": self.limit or (1 << 63) - 1,
            "InUse": self.in_use,
            "RequestedInUse": self.requested_in_use,
            "TotalAllocated": self.reserved,
            "MaxInUse": self.max_in_use,
            "NumAllocs": self.num_allocs,
            "NumReserves": self.num_reserves,
            "NumArenaExtensions": self.num_extensions - self.num_shrinkages,
            "NumArenaShrinkages": self.num_shrinkages,
            "MaxAllocSize": self.max_alloc_size,
        }
        return {key: str(value) for key, value in values.items()}


@dataclass(frozen=True, repr=False)
class PoolStats(Stats):
    """Counters of one `DriverPool`; those of `Stats` count the blocks of this object.

    ``reserved`` and ``max_reserved`` are the driver's, of the whole pool; ``num_shrinkages``
    counts calls of ``shrink``; regions, extensions and the largest free block are 0, because the
    driver has no query for them.

    Attributes
    ----------
    pool_used, max_pool_used : int
        Bytes in use in the whole pool as the driver counts them, by all users of the pool. A driver
        may count a freed block until its stream has reached the free, and longer.

    Examples
    --------
    >>> import gpumem
    >>> pool = gpumem.DriverPool("host")
    >>> buffer = pool.allocate(1000)
    >>> stats = pool.stats()
    >>> stats.requested_in_use, stats.pool_used >= 1000
    (1000, True)
    """

    pool_used: int
    max_pool_used: int

    def as_ort(self) -> dict[str, str]:
        """Return ONNX Runtime's keys as it fills them for a driver's pool.

        ``Limit`` is 0 if the pool has none; ``NumReserves`` and ``NumArenaExtensions`` are
        always 0.
        """
        return super().as_ort() | {
            "Limit": str(self.limit),
            "NumReserves": "0",
            "NumArenaExtensions": "0",
        }


@dataclass(frozen=True)
class BlockInfo:
    """One block of a region.

    Attributes
    ----------
    address : int
        Address of its first byte.
    nbytes : int
        Requested bytes; 0 unless it is used.
    allocated_nbytes : int
        Bytes of the block, padding included.
    used : bool
        In use, or free.
    region : int
        Slot of the region it lies in.
    stream : int
        Handle of the stream it belongs to or was last freed on; 0 if it is free for every stream.
    pending_free : bool
        Freed, but not reusable until streams recorded by `Buffer.record_stream` have passed it, or
        because a debug heap keeps it in quarantine.
    tag : str
        The tag it was allocated under, see `Arena.tag`.
    asleep : bool
        Its memory is given back until `Arena.wake`.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> block = next(block for block in arena.blocks() if block.used)
    >>> block.address == buffer.ptr, block.nbytes, block.allocated_nbytes
    (True, 1000, 1024)
    """

    address: int
    nbytes: int
    allocated_nbytes: int
    used: bool
    region: int
    stream: int
    pending_free: bool = False
    tag: str = "default"
    asleep: bool = False


@dataclass(frozen=True)
class RetainedRegion:
    """A region that a shrink could not release.

    Attributes
    ----------
    address, allocated_nbytes : int
        Its first address and its size.
    reason : str
        Why it was not released.
    blocks : tuple of BlockInfo
        Its live blocks, then freed ones that other streams still use.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host", {"backing": "regions"})
    >>> buffer = arena.allocate(1000)
    >>> (region,) = arena.shrink().retained
    >>> [block.address == buffer.ptr for block in region.blocks]     # in use
    [True]
    """

    address: int
    allocated_nbytes: int
    reason: str
    blocks: tuple[BlockInfo, ...]


@dataclass(frozen=True, repr=False)
class ShrinkReport:
    """Released bytes and retained regions of a shrink.

    Attributes
    ----------
    released_bytes : int
        Bytes released to the driver.
    retained : tuple of RetainedRegion
        Every region that was not released, and why.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host", {"backing": "regions"})
    >>> arena.allocate(1 << 20).close()
    >>> held = arena.stats().reserved
    >>> report = arena.shrink()
    >>> report.released_bytes == held, report.retained
    (True, ())
    """

    released_bytes: int
    retained: tuple[RetainedRegion, ...]

    def __repr__(self) -> str:
        return f"<gpumem.ShrinkReport: {self._summary()}>"

    def _summary(self) -> str:
        held = sum(region.allocated_nbytes for region in self.retained)
        count = f"{len(self.retained)} region{'s' * (len(self.retained) != 1)}"
        return (
            f"{format_size(self.released_bytes)} released, {format_size(held)} retained in {count}"
        )

    def _repr_html_(self) -> str:
        rows = {
            f"{format_size(region.allocated_nbytes)} at {region.address:#x}": region.reason
            for region in self.retained
        }
        return html_table(f"gpumem.ShrinkReport: {self._summary()}", rows)


class BudgetLevel(NamedTuple):
    """One limit of a path through a tree of budgets, at one moment; sizes in bytes.

    Attributes
    ----------
    name : str
        The budget's.
    used : int
        Bytes charged to it and to the budgets below it.
    limit : int or None
        None: no limit of its own.

    Examples
    --------
    >>> import gpumem
    >>> job = gpumem.Budget(1 << 30, name="job")
    >>> arena = gpumem.Arena("host", budget=gpumem.Budget(1 << 20, name="cache", parent=job))
    >>> try:
    ...     arena.allocate(1 << 22)
    ... except gpumem.errors.BudgetExceededError as error:
    ...     for level in error.path:
    ...         print(level)
    BudgetLevel(name='cache', used=0, limit=1048576)
    BudgetLevel(name='job', used=0, limit=1073741824)
    """

    name: str
    used: int
    limit: int | None

"""Reports of allocators: statistics, shrink and out-of-memory reports, levels of a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from gpumem._support.notebooks import html_table
from gpumem._support.out_of_memory import lacking
from gpumem._support.sizes import exact_size, format_size

__all__ = [
    "BlockInfo",
    "BudgetLevel",
    "LimitInForce",
    "NodeHolder",
    "OutOfMemoryReport",
    "PoolStats",
    "RetainedRegion",
    "ShrinkReport",
    "Stats",
]
__dir__ = __all__.copy


_COUNTS = ("num_", "pages_moved", "driver_calls", "moves_refused")
"""Beginnings of the fields of `Stats` that are not bytes."""


@dataclass(frozen=True, repr=False)
class Stats:
    """Counters of one arena at one moment; sizes in bytes.

    Attributes
    ----------
    limit : int or None
        Bytes the arena may hold; None is unlimited.
    in_use, max_in_use : int
        Bytes in use, padding included; the highest so far. If several threads allocate blocks of up
        to 64 KiB, blocks that enter or leave their caches at that moment may be missing or extra.
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
    asleep_bytes : int
        Bytes of live blocks that are stored elsewhere while they are asleep; not dropped ones.
    kept_for_sleep : int
        Bytes of pinned host memory that are kept from the last sleep for the next one; `shrink`
        releases them.
    virtual : int
        Of `reserved`, bytes that virtual tensors hold; their pages in use also count in `in_use`
        and `requested_in_use`.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> stats = arena.stats()
    >>> stats.in_use - stats.requested_in_use        # padding
    24
    """

    limit: int | None
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
    asleep_bytes: int = field(default=0, kw_only=True)
    kept_for_sleep: int = field(default=0, kw_only=True)
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
            name: f"{value:,}" if name.startswith(_COUNTS) else format_size(value)
            for name, value in self.as_dict().items()
            if value is not None
        }
        return html_table(f"gpumem.{type(self).__name__}", rows)

    def as_dict(self) -> dict[str, int | None]:
        """Return the counters by name, which can be written as JSON."""
        return asdict(self)

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
            "Limit": str(self.limit or 0),
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
        Its memory is released until `Arena.wake`.

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


class NodeHolder(NamedTuple):
    """A process or a sealed set that has memory of the budget of a node, at one moment.

    Attributes
    ----------
    name : str
        The name that it leases under.
    process : int
        Its id, in its own PID namespace; 0: a sealed set, which no process needs to have open.
    is_here : bool
        Whether that is the namespace of this process.
    held : int
        Bytes that it has leased.
    priority : int
    answered : float
        When it last began to serve a request of others: seconds of the monotonic clock; 0: never.
    released : int
        Bytes that it then returned.
    """

    name: str
    process: int
    is_here: bool
    held: int
    priority: int
    answered: float
    released: int

    def who(self) -> str:
        """Return words that name it."""
        if self.process == 0:
            return "a sealed set"
        return f"process {self.process}" + ("" if self.is_here else " of another PID namespace")


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


# ---- out of memory -------------------------------------------------------------------------------

MAX_NAMED = 3  # owners and processes in a message

Remedies = tuple[str, ...]

ALWAYS = {
    "absurd": "the size exceeds the address space; check for an overflow",
    "addresses": "no free range of addresses is large enough, or the limit was lifted meanwhile: "
    "try again, or allocate smaller blocks",
    "copy": "host memory for a copy of the live bytes is missing; free host memory",
    "metadata": "host memory for the allocator's tables is missing; free host memory",
    "source": "the source returned nothing: free buffers, or see the source for the reason",
}
"""Remedies that fit all numbers, by the cause of the refusal."""


@dataclass(frozen=True)
class LimitInForce:
    """A limit that an allocation has to keep to.

    Attributes
    ----------
    what : str
        ``"max_mem"``, ``"limit"`` of an adaptor or a pool, or the name of a budget.
    limit, used : int
        Bytes.
    """

    what: str
    limit: int
    used: int


@dataclass(frozen=True)
class OutOfMemoryReport:
    """The numbers of an `OutOfMemoryError`, of the moment it was raised; sizes in bytes.

    Attributes
    ----------
    memory, resource : str
        The requested memory, and the name of the resource.
    requested_nbytes, allocated_nbytes : int
        Bytes that the caller requested, and bytes of a block for it, padding included.
    stream : int
        Handle of the stream.
    limits : tuple of LimitInForce
        Limits of the resource, the nearest first.
    in_use, reserved : int
        Allocated; held from the device.
    largest_free : int or None
        The largest free block; None where only the driver knows.
    free : int
        Reserved and not allocated. Of these bytes `waiting` were freed on other streams with work
        that is not known to be done, and `movable` lie in whole pages that can move.
    cached : int
        Freed, and cached by threads.
    pending_free : int
        Freed, while streams recorded for it may still use it.
    waiting, movable : int
        See `free`.
    by_owner : mapping of str to int
        Bytes in use by `gpumem.observe.tag`, else by framework, else ``"untagged"``; the largest
        first.
    by_framework : mapping of str to int
        Bytes in use by framework, where that is known.
    asleep : mapping of str to int
        Tags that are asleep (`Arena.sleep`), with the bytes of each that are stored elsewhere; they
        count in none of the sums above.
    device_total, device_free : int or None
        For pinned memory they are the host's.
        Of the whole device, from the driver; None if it does not report them.
    held_here : int
        Held in this memory by gpumem's arenas of this process, and allocated by its pools.
    idle_elsewhere : int
        Of that, bytes that other arenas hold without blocks in them: a `shrink` would release them.
    graph_pools : int
        Held by graph pools of this arena: it counts in its limit, and not in `reserved`.
    held_by_others : int or None
        Other bytes that are not free on the device: of other processes, other libraries of this
        one, and the driver, including its pools' caches and its rounding.
    processes : tuple of (int, int)
        Process ids and bytes on the device as NVML reports them, if the package ``nvidia-ml-py`` is
        installed; else empty.
    collected : int or None
        Bytes that a garbage collection freed before the refusal; None: there was no collection.
    cycles : tuple of (str, int)
        Reference cycles that the collection ended, such as ``"Trainer.loss -> Loss.trainer ->
        Trainer"``, with the bytes of buffers and tensors that only they held; the largest first.
    refused_streams : tuple of (int, str)
        Streams that freed memory waits for and on which the driver records no event, each with the
        name of its error: `CUDA_ERROR_INVALID_HANDLE` if the stream was destroyed, or the handle
        never was a stream. `Arena.reset_stream` makes memory freed there free for every stream.
    remedies : tuple of str
        The one or two remedies that fit the numbers, the better first.
    lacks : str
        What the process ran out of, if not memory: ``"file descriptors"``, ``"memory mappings"``,
        ``"address space"``, ``"private writable memory"``, ``"locked memory"``,
        ``"room in files"``; else empty.
    """

    memory: str
    requested_nbytes: int
    allocated_nbytes: int
    resource: str = ""
    stream: int = 0
    limits: tuple[LimitInForce, ...] = ()
    in_use: int = 0
    reserved: int = 0
    largest_free: int | None = None
    free: int = 0
    cached: int = 0
    pending_free: int = 0
    waiting: int = 0
    movable: int = 0
    by_owner: Mapping[str, int] = field(default_factory=dict)
    by_framework: Mapping[str, int] = field(default_factory=dict)
    asleep: Mapping[str, int] = field(default_factory=dict)
    device_total: int | None = None
    device_free: int | None = None
    held_here: int = 0
    idle_elsewhere: int = 0
    graph_pools: int = 0
    held_by_others: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    collected: int | None = None
    cycles: tuple[tuple[str, int], ...] = ()
    refused_streams: tuple[tuple[int, str], ...] = ()
    remedies: Remedies = ()
    lacks: str = ""

    @property
    def limit(self) -> int:
        """The tightest of the limits in bytes; 0 where there is none."""
        return min((limit.limit for limit in self.limits), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which can be written as JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return a message of a few lines; the fields have the exact numbers."""
        collected = collection_text(self.collected or 0, self.cycles)
        lines = (self._asked(), self.owners(), self._states(), self._device(), collected)
        return "\n".join(line for line in lines if line)

    def _asked(self) -> str:
        numbers = [f"{format_size(self.in_use)} in use", f"{format_size(self.reserved)} reserved"]
        numbers.append(f"limit {format_size(self.limit)}" if self.limit else "no limit")
        if self.largest_free is not None:
            numbers.append(f"largest free block {format_size(self.largest_free)}")
        asked, padded = exact_size(self.requested_nbytes), exact_size(self.allocated_nbytes)
        if self.allocated_nbytes - self.requested_nbytes >= 1024:
            asked += f", {padded} with padding"
        return (
            f"{self.memory} is out of {self.lacks or 'memory'}: asked for {asked}; "
            + ", ".join(numbers)
            + (f"; {'; or '.join(self.remedies)}" if self.remedies else "")
        )

    def owners(self) -> str:
        """Return a line with the largest owners; empty without tags or frameworks."""
        if not set(self.by_owner) - {"untagged"}:
            return ""
        ordered = sorted(self.by_owner.items(), key=lambda item: -item[1])
        named = [f"{owner} {format_size(nbytes)}" for owner, nbytes in ordered[:MAX_NAMED]]
        more = sum(nbytes for _, nbytes in ordered[MAX_NAMED:])
        return "in use by " + ", ".join(named + ([f"others {format_size(more)}"] if more else []))

    def _states(self) -> str:
        states = (
            (self.free, "free"),
            (self.cached, "in threads' caches"),
            (self.pending_free, "pending free on other streams"),
        )
        shown = [f"{format_size(nbytes)} {words}" for nbytes, words in states if nbytes]
        lines = ["reserved, and not in use: " + ", ".join(shown)] if shown else []
        if self.graph_pools:
            lines.append(f"held by graph pools: {format_size(self.graph_pools)}")
        if self.asleep:
            tags = (f"{tag} with {format_size(nbytes)}" for tag, nbytes in self.asleep.items())
            lines.append("asleep: " + ", ".join(tags))
        return "\n".join(lines)

    def _device(self) -> str:
        if self.device_total is None or self.device_free is None or self.held_by_others is None:
            return ""
        where = "host" if self.memory.endswith("/host_accessible") else "device"
        return (
            f"the {where}: {format_size(self.device_free)} of "
            f"{format_size(self.device_total)} free, "
            f"{format_size(self.held_here)} held by gpumem in this process, "
            f"{format_size(self.held_by_others)} by others and the driver"
            + "".join(f", process {pid} {format_size(n)}" for pid, n in self.processes[:MAX_NAMED])
        )

    def under(
        self, path: tuple[tuple[str, int, int | None], ...], advice: str
    ) -> OutOfMemoryReport:
        """Return the same with a budget's levels, (name, used, limit), and its advice, first."""
        levels = tuple(LimitInForce(n, limit, used) for n, used, limit in path if limit is not None)
        others = tuple(found for found in self.limits if found.what != "limit")
        remedies = (advice, *(found for found in self.remedies if found != advice))
        return replace(self, limits=levels + others, remedies=remedies[:2])


def collection_text(freed: int, cycles: tuple[tuple[str, int], ...]) -> str:
    """Return a line about a garbage collection before a refusal; empty if it freed nothing."""
    if not freed:
        return ""
    named = [f"{cycle} ({format_size(nbytes)})" for cycle, nbytes in cycles[:MAX_NAMED]]
    named += [f"{len(cycles) - MAX_NAMED} more"] if len(cycles) > MAX_NAMED else []
    held = f", which reference cycles held: {', '.join(named)}" if named else ""
    return f"a garbage collection before this error freed {format_size(freed)}{held}"


def absurd(memory: str, asked: int, rounded: int, **more: Any) -> OutOfMemoryReport:
    """Return the report of a size that exceeds the address space."""
    return OutOfMemoryReport(memory, asked, rounded, remedies=(ALWAYS["absurd"],), **more)


def larger_than(what: str) -> str:
    """Return the remedy for a block that is larger than a limit."""
    return f"the block alone is larger than {what}: raise {what}"


def advised(report: OutOfMemoryReport, reason: str, **more: Any) -> OutOfMemoryReport:
    """Return the same with what the process ran out of, and remedies as `find_remedies` has them.

    Limits of the process are looked at only where the device has memory left.
    """
    room = report.device_free is None or report.device_free >= report.allocated_nbytes
    found = None
    if reason in ("addresses", "metadata") or (reason == "driver" and room):
        found = lacking(report.allocated_nbytes)
    if found is None:
        return replace(report, remedies=find_remedies(report, reason, **more))
    return replace(report, lacks=found[0], remedies=(found[1],))


def find_remedies(
    report: OutOfMemoryReport, reason: str, *, could_move: bool = False, page: int = 0
) -> Remedies:
    """Return remedies, the better first.

    Parameters
    ----------
    report : OutOfMemoryReport
        The numbers.
    reason : str
        The cause: a key of `ALWAYS`, or ``"limit"``, the resource's own; ``"budget"``, which has
        advice in its error; ``"driver"``.
    could_move : bool, optional
        The resource is an arena with pages that do not move, and could.
    page : int, optional
        Bytes of the smallest page of an arena with pages that move; 0: it has none.
    """
    if reason in ALWAYS:
        return (ALWAYS[reason],)
    if reason == "limit" and report.allocated_nbytes > report.limit:
        return (larger_than(report.limits[0].what),)
    in_pages = -(-report.allocated_nbytes // page) * page if page else 0
    if reason == "limit" and in_pages > report.limit:
        what = report.limits[0].what
        pages = f"{format_size(in_pages)} in pages of {format_size(page)}"
        return (f"the block takes {pages}: raise {what}",)
    if reason == "driver" and report.device_total and report.allocated_nbytes > report.device_total:
        return (
            f"{report.memory} has {format_size(report.device_total)} in all: take smaller blocks",
        )
    found = []
    if reason == "driver" and report.idle_elsewhere >= report.allocated_nbytes:
        idle = format_size(report.idle_elsewhere)
        found.append(f"shrink() other arenas of this process: {idle} lie idle there")
    if report.waiting + report.pending_free >= report.allocated_nbytes:
        found.append(_against_streams(report))
    if reason in ("limit", "driver") and report.graph_pools >= report.allocated_nbytes:
        found.append(
            f"close graph pools that are not needed, which hold {format_size(report.graph_pools)}"
        )
    held = report.reserved + report.graph_pools
    room = {"limit": report.limit - held, "driver": report.device_free or 0}
    # A free block that is large enough is whole: it waits for a stream.
    in_pieces = (
        (report.largest_free or 0) < report.allocated_nbytes <= (report.free + room.get(reason, 0))
    )
    if could_move and in_pieces:
        found.append('backing="virtual", which moves pages: enough is free here, but in pieces')
    if reason == "limit":
        found.append(f"free buffers, or raise {report.limits[0].what}")
        if page and in_pieces and report.waiting + report.pending_free < report.allocated_nbytes:
            found[-1] += (
                f": of {format_size(report.free)} that are free, {format_size(report.movable)} lie "
                "in whole pages, which can move; live blocks hold the others in place"
            )
    if reason == "driver":
        found.append(_against_the_driver(report))
    return tuple(found[:2])


def _against_streams(report: OutOfMemoryReport) -> str:
    amount = format_size(report.waiting + report.pending_free)
    if not report.refused_streams:
        return f"wait for streams: their unfinished work holds {amount} (oom_wait_ms)"
    refused = [f"{stream:#x} ({error})" for stream, error in report.refused_streams[:MAX_NAMED]]
    refused += ["others"] if len(report.refused_streams) > MAX_NAMED else []
    return (
        f"call reset_stream() for streams that are gone: {amount} wait for events that the driver "
        f"does not record, on {', '.join(refused)}"
    )


def _against_the_driver(report: OutOfMemoryReport) -> str:
    others = report.held_by_others or 0
    if others >= max(report.allocated_nbytes, report.held_here):
        return f"free memory that others hold on the device, {format_size(others)}"
    return "free buffers, or memory that others hold on the device"

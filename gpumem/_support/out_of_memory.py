"""What an out-of-memory error knows: who holds what, what could be had, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpumem._support.sizes import exact_size, format_size

__all__ = ["LimitInForce", "OutOfMemoryReport", "absurd", "find_remedies"]

MOST_NAMED = 3  # owners and processes that a message names

Remedies = tuple[str, ...]

ALWAYS = {
    "absurd": "the size exceeds the address space; check for an overflow",
    "addresses": "no free range of addresses is large enough; allocate smaller blocks",
    "copy": "host memory for a copy of the live bytes is missing; free host memory",
}
"""What helps whatever the numbers are, by what refused."""


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
    """The numbers behind an `OutOfMemoryError`, of the moment it was raised; sizes in bytes.

    Attributes
    ----------
    memory, resource : str
        What was asked: the memory, and the name of the resource.
    requested_nbytes, allocated_nbytes : int
        Bytes that the caller asked for, and bytes of a block for it, padding included.
    stream : int
        Handle of the stream.
    limits : tuple of LimitInForce
        What bounds the resource, the nearest first.
    in_use, reserved : int
        Allocated; held from the device.
    largest_free : int or None
        The largest free block; None where only the driver knows.
    free : int
        Reserved and not allocated: of it `waiting` was freed on other streams, whose work is not
        known to be done, and `movable` lies in whole pages that can go where they are needed.
    cached : int
        Freed, and cached by threads.
    pending_free : int
        Freed, while streams recorded for it may still use it.
    waiting, movable : int
        See `free`.
    by_owner : mapping of str to int
        Bytes in use by `gpumem.observe.tag`, else by framework, else ``"untagged"``; most first.
    by_framework : mapping of str to int
        Bytes in use by framework, where that is known.
    asleep : mapping of str to int
        Tags that are asleep (`Arena.sleep`), with the bytes of each that wait elsewhere; they count
        in none of the sums above.
    device_total, device_free : int or None
        Of the whole device, from the driver; None if it does not report them.
    held_here : int
        Held in this memory by gpumem's arenas of this process, and handed out by its pools.
    idle_elsewhere : int
        Of that, what other arenas hold without blocks in it, and a `shrink` would give back.
    graph_pools : int
        Held by graph pools of this arena: it counts in its limit, and not in `reserved`.
    held_by_others : int or None
        The rest that the device does not have free: other processes, other libraries of this one,
        and the driver, with what its pools keep and what it rounds up.
    processes : tuple of (int, int)
        Process ids and bytes on the device as NVML tells them, if the package ``nvidia-ml-py`` is
        installed; else empty.
    refused_streams : tuple of (int, str)
        Streams that freed memory waits for and on which the driver records no event, each with the
        name of its error: `CUDA_ERROR_INVALID_HANDLE` if the stream was destroyed, or never was
        one. `Arena.reset_stream` makes what was freed there free for every stream.
    remedies : tuple of str
        The one or two that fit the numbers, the better first.
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
    refused_streams: tuple[tuple[int, str], ...] = ()
    remedies: Remedies = ()

    @property
    def limit(self) -> int:
        """The tightest of the limits in bytes; 0 where there is none."""
        return min((limit.limit for limit in self.limits), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which can be written as JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return a message of a few lines; the fields have the exact numbers."""
        lines = (self._asked(), self.owners(), self._states(), self._device())
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
            f"{self.memory} is out of memory: asked for {asked}; "
            + ", ".join(numbers)
            + (f"; {'; or '.join(self.remedies)}" if self.remedies else "")
        )

    def owners(self) -> str:
        """Return a line that says who holds the most; empty without tags or frameworks."""
        if not set(self.by_owner) - {"untagged"}:
            return ""
        ordered = sorted(self.by_owner.items(), key=lambda item: -item[1])
        named = [f"{owner} {format_size(nbytes)}" for owner, nbytes in ordered[:MOST_NAMED]]
        rest = sum(nbytes for _, nbytes in ordered[MOST_NAMED:])
        return "in use by " + ", ".join(named + ([f"others {format_size(rest)}"] if rest else []))

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
        return (
            f"the device: {format_size(self.device_free)} of "
            f"{format_size(self.device_total)} free, "
            f"{format_size(self.held_here)} held by gpumem in this process, "
            f"{format_size(self.held_by_others)} by others and the driver"
            + "".join(f", process {pid} {format_size(n)}" for pid, n in self.processes[:MOST_NAMED])
        )

    def under(
        self, path: tuple[tuple[str, int, int | None], ...], advice: str
    ) -> OutOfMemoryReport:
        """Return the same with a budget's levels, (name, used, limit), and its advice, first."""
        levels = tuple(LimitInForce(n, limit, used) for n, used, limit in path if limit is not None)
        others = tuple(found for found in self.limits if found.what != "limit")
        remedies = (advice, *(found for found in self.remedies if found != advice))
        return replace(self, limits=levels + others, remedies=remedies[:2])


def absurd(memory: str, asked: int, rounded: int, **more: Any) -> OutOfMemoryReport:
    """Return the report of a size that exceeds the address space."""
    return OutOfMemoryReport(memory, asked, rounded, remedies=(ALWAYS["absurd"],), **more)


def larger_than(what: str) -> str:
    """Return the remedy for a block that no free memory makes room for under a limit."""
    return f"the block alone is larger than {what}: raise {what}"


def find_remedies(
    report: OutOfMemoryReport, reason: str, *, could_move: bool = False, page: int = 0
) -> Remedies:
    """Say what would help, the better first.

    Parameters
    ----------
    report : OutOfMemoryReport
        The numbers.
    reason : str
        What refused: a key of `ALWAYS`, or ``"limit"``, the resource's own; ``"budget"``, whose
        advice comes with its error; ``"driver"``.
    could_move : bool, optional
        The resource is an arena whose pages do not move, and could.
    page : int, optional
        Bytes of the smallest page of an arena whose pages move; 0: it has none.
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
    in_pieces = report.allocated_nbytes <= report.free + room.get(reason, 0)
    if could_move and in_pieces:
        found.append('backing="virtual", whose pages move: enough is free here, but in pieces')
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
        return f"wait for streams, whose unfinished work holds {amount} (oom_wait_ms)"
    refused = [f"{stream:#x} ({error})" for stream, error in report.refused_streams[:MOST_NAMED]]
    refused += ["others"] if len(report.refused_streams) > MOST_NAMED else []
    return (
        f"call reset_stream() for streams that are gone: {amount} wait for events that the driver "
        f"does not record, on {', '.join(refused)}"
    )


def _against_the_driver(report: OutOfMemoryReport) -> str:
    others = report.held_by_others or 0
    if others >= max(report.allocated_nbytes, report.held_here):
        return f"free memory that others hold on the device, {format_size(others)}"
    return "free buffers, or memory that others hold on the device"

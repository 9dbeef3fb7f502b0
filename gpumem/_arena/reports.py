"""Reports of an arena, made from the plain values that `status.pyx` copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from gpumem._support.sizes import format_size
from gpumem._support.texts import counted
from gpumem.errors import InUseError
from gpumem.stats import (
    BlockInfo,
    LimitInForce,
    OutOfMemoryReport,
    RetainedRegion,
    ShrinkReport,
    Stats,
    advised,
)

if TYPE_CHECKING:
    from gpumem.debugging import OutstandingBlock

Row = tuple[Any, ...]
"""The first fields of a `BlockInfo`, in order."""


def stats_of(counters: dict[str, int]) -> Stats:
    """Return the counters of one arena."""
    found: dict[str, Any] = {each.name: counters[each.name] for each in fields(Stats)}
    return Stats(**(found | {"limit": counters["limit"] or None}))


def sum_of_stats(parts: Sequence[Stats]) -> Stats:
    """Add the counters of arenas that share a limit, that of the first one."""
    largest = ("max_alloc_size", "largest_free")
    sums = {
        each.name: sum(getattr(part, each.name) for part in parts)
        for each in fields(parts[0])
        if each.name not in ("limit", *largest)
    }
    highest = {name: max(getattr(part, name) for part in parts) for name in largest}
    return Stats(limit=parts[0].limit, **sums, **highest)


def bounded(stats: Stats, charged: int) -> Stats:
    """Return counters with the charged bytes as the most that is reserved."""
    return stats if stats.reserved <= charged else replace(stats, reserved=charged)


# ---- blocks --------------------------------------------------------------------------------------


def blocks_of(rows: Iterable[Row], in_heap: Mapping[int, tuple[int, bool]]) -> list[BlockInfo]:
    """Return blocks as their users see them.

    Blocks in the quarantine of a debug heap are in use for the arena, and free for its users;
    `in_heap` has the requested bytes of each block of the heap, and whether it is live.
    """
    blocks = [BlockInfo(*row) for row in rows]
    return [_as_its_user_sees_it(block, in_heap) for block in blocks] if in_heap else blocks


def _as_its_user_sees_it(block: BlockInfo, in_heap: Mapping[int, tuple[int, bool]]) -> BlockInfo:
    # A block that the heap does not know was freed since, or was allocated before the heap.
    if not block.used or block.address not in in_heap:
        return block
    requested, live = in_heap[block.address]
    return replace(block, nbytes=requested if live else 0, used=live, pending_free=not live)


def tagged_blocks(
    blocks: Iterable[OutstandingBlock], tag: str, asleep: bool
) -> list[OutstandingBlock]:
    """Return live blocks of a debug heap with the tag that they were allocated under."""
    return [replace(block, tag=tag, asleep=asleep) for block in blocks]


def shrink_report(
    released: int, blocks: Iterable[BlockInfo], of_tags: Sequence[ShrinkReport]
) -> ShrinkReport:
    """Return the report of a shrink that left these blocks, added to those of the arena's tags."""
    regions: dict[int, list[BlockInfo]] = {}
    for block in blocks:
        regions.setdefault(block.region, []).append(block)
    retained = tuple(_retained_region(blocks) for blocks in regions.values())
    return ShrinkReport(
        released + sum(part.released_bytes for part in of_tags),
        sum((part.retained for part in of_tags), retained),
    )


def _retained_region(blocks: list[BlockInfo]) -> RetainedRegion:
    # Both hold a region: live blocks for their users, pending ones for other streams.
    live = tuple(block for block in blocks if block.used)
    pending = tuple(block for block in blocks if block.pending_free)
    reasons = [_counted_with_size(live, "live block")] if live else []
    if pending:
        reasons.append(f"{_counted_with_size(pending, 'block')} that other streams still use")
    reasons += _held_for_streams(blocks)
    return RetainedRegion(
        address=blocks[0].address,
        allocated_nbytes=sum(block.allocated_nbytes for block in blocks),
        reason=", ".join(reasons) or "free, but the driver did not take it back",
        blocks=live + pending,
    )


def _held_for_streams(blocks: Iterable[BlockInfo]) -> list[str]:
    """Describe free bytes that are reserved for one stream until its work is known to be done."""
    # They were freed there, or are the unused tail of memory made for a block of the stream.
    held: dict[int, int] = {}
    for block in blocks:
        if not block.used and not block.pending_free and block.stream:
            held[block.stream] = held.get(block.stream, 0) + block.allocated_nbytes
    return [
        f"{format_size(nbytes)} free, for stream {stream:#x} whose work is not known to be done"
        for stream, nbytes in sorted(held.items())
    ]


def _counted_with_size(blocks: Sequence[BlockInfo], noun: str) -> str:
    total = sum(block.allocated_nbytes for block in blocks)
    return f"{counted(len(blocks), noun)} of {format_size(total)}"


def in_use_error(name: str, stats: Stats, graphs: int, spans: int, live: str) -> InUseError:
    """Return the error of a close that is refused; `live` lists blocks of a debug heap."""
    blocks = stats.num_allocs - stats.num_frees
    found, advice = [], []
    if blocks or not (graphs or spans):
        found.append(f"{format_size(stats.in_use)} in {counted(blocks, 'block')}")
        advice.append("close the buffers and drop their views")
    if spans:
        # Their bytes count with those of blocks, where there are any.
        held = "" if found else f"{format_size(stats.in_use)} in "
        found.append(held + counted(spans, "virtual tensor"))
        advice.append("close the virtual tensors")
    if graphs:
        found.append(f"{counted(graphs, 'graph')} with memory of its pools")
        advice.append("drop the graphs")
    return InUseError(
        f"arena {name!r} cannot be closed; in use: {', '.join(found)}; "
        f"{', '.join(advice)} first{live}"
    )


# ---- a refused allocation ------------------------------------------------------------------------


def out_of_memory(
    memory: str,
    requested: int,
    rounded: int,
    name: str,
    figures: dict[str, Any],
    device: dict[str, Any],
    reason: str,
    could_move: bool,
    page: int,
) -> OutOfMemoryReport:
    """Return the report of a refused allocation; the last three are those of `find_remedies`."""
    # The arena's own limit; budgets add theirs to the report.
    limit = figures["limit"]
    if reason == "limit" and not limit:  # none, or none any more
        reason = "addresses"
    report = OutOfMemoryReport(
        memory,
        requested,
        rounded,
        name,
        figures["stream"],
        (LimitInForce("max_mem", limit, figures["held"]),) if limit else (),
        refused_streams=figures["refused_streams"],
        **figures["memory"],
        **device,
    )
    return advised(report, reason, could_move=could_move, page=page)


def add_memory(total: dict[str, Any], part: Mapping[str, Any], tag: str) -> None:
    """Add the figures of a tag's arena to a sum."""
    for name, value in part.items():
        if name == "by_owner":
            owned = {
                f"tag {tag}" if owner == "untagged" else owner: n for owner, n in value.items()
            }
            total[name] = _added(total.get(name, {}), owned)
        elif isinstance(value, dict):
            total[name] = _added(total.get(name, {}), value)
        elif name == "largest_free":
            total[name] = max(total.get(name, 0), value)
        else:
            total[name] = total.get(name, 0) + value


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return _largest_first({key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}})


def _largest_first(sums: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def owners_of(
    in_use: int,
    by_tag: dict[str, int],
    by_framework: Iterable[tuple[str, int, int, int]],
    span_used: int,
) -> tuple[dict[str, int], dict[str, int]]:
    """Divide the bytes in use by owner and by framework, the largest first.

    Each row of `by_framework` has its name, the bytes that hooks counted, the recorded bytes, and
    those of them that were recorded without a tag. Hooks count also without a recording; recorded
    bytes are among those of hooks.
    """
    owners, frameworks = dict(by_tag), {}
    for name, through_hooks, recorded, untagged in by_framework:
        held = max(through_hooks, recorded)
        if held:
            frameworks[name] = held
        if held > recorded - untagged:
            owners[name] = owners.get(name, 0) + held - (recorded - untagged)
    # Records and sums are of different moments: the difference must not be negative.
    remaining = in_use - min(in_use, sum(owners.values()))
    if remaining:
        owners["untagged"] = remaining
    if span_used:
        owners["virtual tensors"] = span_used
    return _largest_first(owners), _largest_first(frameworks)

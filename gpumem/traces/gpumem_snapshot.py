"""Traces from snapshots of gpumem: the blocks of one moment, the oldest first."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem._snapshots.resources import ResourceSnapshot, counted_once
from gpumem._snapshots.snapshot import Snapshot
from gpumem.errors import TraceError
from gpumem.traces.builder import TraceBuilder, require_device
from gpumem.traces.frames import owner_named
from gpumem.traces.trace import Trace

MAGIC = b"{"


def traces_of_snapshot(snapshot: Snapshot, name: str, device: int | None = None) -> list[Trace]:
    """Make a trace of each memory, which allocates the blocks in use of a snapshot, and frees none.

    Blocks are in the order of their age. Blocks of unrecorded age count as the oldest.

    Parameters
    ----------
    snapshot : Snapshot
    name : str
        Name of the traces.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, all.

    Raises
    ------
    TraceError
        A snapshot without blocks in use.
    """
    sources = counted_once(snapshot.resources)
    memories = sorted({found.memory for found in sources})
    require_device(device, len(memories))
    traces = [
        _trace([found for found in sources if found.memory == memory], name)
        for memory in (memories if device is None else memories[device : device + 1])
    ]
    if not any(trace.events for trace in traces):
        raise TraceError("the snapshot has nothing in use")
    return [trace for trace in traces if trace.events]


def _trace(sources: Sequence[ResourceSnapshot], name: str) -> Trace:
    """Make the trace of the resources of one memory."""
    blocks = [(found, block) for found in sources for block in found.live]
    oldest = max((block.age or 0 for _, block in blocks), default=0)
    ages = [oldest if block.age is None else block.age for _, block in blocks]
    builder = TraceBuilder()
    keys = {found.key for found in sources}
    # Memory that an arena has of another resource is held there.
    for found in (each for each in sources if each.source not in keys):
        builder.hold("counts", found.counts["reserved"])
        # Ranges are addresses for pages.
        regions = [(each.address, each.nbytes) for each in found.regions if each.kind != "range"]
        for address, nbytes in [*found.pages.tolist(), *regions]:
            builder.segment_begin(found.key << 64 | address, nbytes)
    for number in sorted(range(len(blocks)), key=lambda number: -ages[number]):
        found, block = blocks[number]
        builder.alloc(
            f"block {block.address:#x}",
            found.key << 64 | block.address,
            block.nbytes,
            block.stream,
            (oldest - ages[number]) // 1000,
            owner_named(block.tag, block.stack, block.framework, found.name),
            block.stack,
        )
    memory = sources[0].memory
    meta = {"source": "snapshot", "memory": memory, "moment": True, "ended_us": oldest // 1000}
    return builder.trace(name, meta)

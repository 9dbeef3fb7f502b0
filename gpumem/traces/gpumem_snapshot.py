"""Traces from saved snapshots of gpumem: the blocks of one moment, the oldest first."""

from __future__ import annotations

from typing import Any

from gpumem._support.nesting import addresses_of_others
from gpumem._support.texts import shown
from gpumem.errors import TraceError
from gpumem.traces.builder import TraceBuilder, require_device
from gpumem.traces.frames import owner_named
from gpumem.traces.trace import Frames, Trace

MAGIC = b"{"
_FORMAT, _VERSION = "gpumem.snapshot", 1
_MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def traces_of_snapshot(plain: object, name: str, device: int | None = None) -> list[Trace]:
    """Make a trace of each memory, which allocates the blocks in use of a snapshot, and frees none.

    Blocks are in the order of their age. Blocks of unrecorded age count as the oldest.

    Parameters
    ----------
    plain : dict
        As ``snapshot.schema.json`` of `gpumem.observe` describes it.
    name : str
        Name of the traces.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, all.

    Raises
    ------
    TraceError
        Not a snapshot, or a snapshot without blocks in use.
    """
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise TraceError(f"not a snapshot: its format is not {_FORMAT!r}")
    if plain.get("version") != _VERSION:
        raise TraceError(f"a snapshot of version {shown(plain.get('version'))}, not {_VERSION}")
    try:
        return _traces(plain, name, device)
    except TraceError:
        raise
    except _MALFORMED as error:
        raise TraceError(f"not a snapshot: {type(error).__name__}: {error}") from None


def _traces(plain: dict[str, Any], name: str, device: int | None) -> list[Trace]:
    # Blocks of an adaptor are blocks of its upstream, which is listed itself.
    sources = [found for found in plain["resources"] if not found["upstreams"]]
    memories = sorted({found["memory"] for found in sources})
    require_device(device, len(memories))
    stacks = [_stack(frames) for frames in plain["stacks"]]
    chosen = memories if device is None else memories[device : device + 1]
    used = {memory: [each for each in sources if each["memory"] == memory] for memory in chosen}
    traces = [
        _trace(memory, inside, stacks, name)
        for memory, inside in used.items()
        if any(_used(found) for found in inside)
    ]
    if not traces:
        raise TraceError("the snapshot has nothing in use")
    return traces


def _trace(memory: str, sources: list[dict[str, Any]], stacks: list[Frames], name: str) -> Trace:
    """Make the trace of the resources of one memory."""
    origins = {found["key"]: found.get("source") for found in sources}
    # Memory that an arena has of another resource is held there, and is not one of its blocks.
    regions = {
        found["key"]: [address for address, nbytes in _segments(found) if nbytes]
        for found in sources
        if found.get("source") in origins
    }
    blocks = [
        (found, block)
        for found in sources
        for block in _apart(_used(found), addresses_of_others(found["key"], origins, regions))
    ]
    oldest = max((int(block.get("age_ns", 0)) for _, block in blocks), default=0)
    blocks.sort(key=lambda pair: -int(pair[1].get("age_ns", oldest)))
    builder = TraceBuilder()
    for found in (each for each in sources if each["key"] not in regions):
        builder.hold("counts", int(found["counts"]["reserved"]))
        for address, nbytes in _segments(found):
            builder.segment_begin(int(found["key"]) << 64 | address, nbytes)
    for found, block in blocks:
        address, age = int(block["address"]), int(block.get("age_ns", oldest))
        frames = stacks[block["stack"]] if block.get("stack") is not None else ()
        builder.alloc(
            f"block {address:#x}",
            int(found["key"]) << 64 | address,
            int(block["nbytes"]),
            int(block["stream"]),
            (oldest - age) // 1000,
            owner_named(block.get("tag"), frames, block.get("framework"), found["name"]),
            frames,
        )
    meta = {"source": "snapshot", "memory": memory, "moment": True, "ended_us": oldest // 1000}
    return builder.trace(name, meta)


def _stack(frames: Any) -> Frames:
    return tuple((str(file), int(line), str(function)) for file, line, function in frames)


def _segments(found: dict[str, Any]) -> list[tuple[int, int]]:
    """Return address and bytes of an arena's pages, or else of its regions."""
    # Ranges are addresses for pages.
    regions = [each for each in found.get("regions", ()) if each["kind"] != "range"]
    listed = [*found.get("pages", ()), *regions]
    return [(int(each["address"]), int(each["nbytes"])) for each in listed]


def _apart(blocks: list[dict[str, Any]], addresses: list[int]) -> list[dict[str, Any]]:
    """Leave out the blocks in which an address lies."""
    return [
        block
        for block in blocks
        if not any(0 <= at - block["address"] < block["allocated_nbytes"] for at in addresses)
    ]


def _used(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in found["blocks"] if block["state"] == "used"]

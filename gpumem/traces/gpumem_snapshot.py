"""Traces from saved snapshots of gpumem: the blocks of one moment, the oldest first."""

from __future__ import annotations

import json
from typing import IO, Any

from gpumem._support.texts import shown
from gpumem.errors import TraceError
from gpumem.traces.builder import TraceBuilder, owner_named, require_device
from gpumem.traces.trace import Trace

__all__ = ["MAGIC", "read_snapshot", "trace_of_snapshot"]

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


def read_snapshot(file: IO[bytes], name: str, device: int | None = None) -> Trace:
    """Read a trace from an open snapshot in JSON; see `trace_of_snapshot`."""
    try:
        plain = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not a snapshot: {error}") from None
    return trace_of_snapshot(plain, name, device)


def trace_of_snapshot(plain: object, name: str, device: int | None = None) -> Trace:
    """Make a trace that allocates the blocks in use of a snapshot, and frees nothing.

    Blocks are in the order of their age. Blocks whose age was not recorded count as the oldest.

    Parameters
    ----------
    plain : dict
        As ``snapshot.schema.json`` of `gpumem.observe` describes it.
    name : str
        Name of the trace.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, the one with
        the most bytes in use.

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
        return _trace(plain, name, device)
    except TraceError:
        raise
    except _MALFORMED as error:
        raise TraceError(f"not a snapshot: {type(error).__name__}: {error}") from None


def _trace(plain: dict[str, Any], name: str, device: int | None) -> Trace:
    # Blocks of an adaptor are blocks of its upstream, which is listed itself.
    sources = [found for found in plain["resources"] if not found["upstreams"]]
    memories = sorted({found["memory"] for found in sources})
    require_device(device, len(memories))
    used = {
        memory: [(found, b) for found in sources if found["memory"] == memory for b in _used(found)]
        for memory in memories
    }
    if not any(used.values()):
        raise TraceError("the snapshot has nothing in use")
    if device is None:
        memory = max(used, key=lambda each: sum(block["nbytes"] for _, block in used[each]))
    else:
        memory = memories[device]
    blocks = used[memory]
    oldest = max((int(block.get("age_ns", 0)) for _, block in blocks), default=0)
    blocks.sort(key=lambda pair: -int(pair[1].get("age_ns", oldest)))
    builder = TraceBuilder()
    for found in sources:
        if found["memory"] == memory:
            builder.hold("counts", int(found["counts"]["reserved"]))
    for found, block in blocks:
        address, age = int(block["address"]), int(block.get("age_ns", oldest))
        builder.alloc(
            f"block {address:#x}",
            int(found["key"]) << 64 | address,
            int(block["nbytes"]),
            int(block["stream"]),
            (oldest - age) // 1000,
            _owner(plain["stacks"], found, block),
        )
    meta = {"source": "snapshot", "memory": memory, "moment": True, "ended_us": oldest // 1000}
    return builder.trace(name, meta)


def _used(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in found["blocks"] if block["state"] == "used"]


def _owner(stacks: list[Any], found: dict[str, Any], block: dict[str, Any]) -> str:
    frames = stacks[block["stack"]] if block.get("stack") is not None else ()
    return owner_named(block.get("tag"), frames, block.get("framework"), found["name"])

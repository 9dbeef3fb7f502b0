"""Traces from saved snapshots of gpumem: what lived at one moment, in the order of its age."""

from __future__ import annotations

import json
from typing import IO, Any

from gpumem.errors import TraceError
from gpumem.traces.builder import Recorder
from gpumem.traces.trace import Trace

__all__ = ["MAGIC", "read_snapshot", "trace_of_snapshot"]

MAGIC = b"{"
_FORMAT, _VERSION = "gpumem.snapshot", 1
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)


def read_snapshot(file: IO[bytes], name: str, device: int | None = None) -> Trace:
    """Read a trace from an open snapshot in JSON; see `trace_of_snapshot`."""
    try:
        plain = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not a snapshot: {error}") from None
    return trace_of_snapshot(plain, name, device)


def trace_of_snapshot(plain: object, name: str, device: int | None = None) -> Trace:
    """Make a trace that allocates what a snapshot shows in use, and frees nothing.

    Blocks come in the order of their age. Those that were not recorded, and so have none, count as
    the oldest.

    Parameters
    ----------
    plain : dict
        As ``snapshot.schema.json`` of `gpumem.observe` describes it.
    name : str
        Name of the trace.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, the one of which
        most bytes are in use.

    Raises
    ------
    TraceError
        No snapshot, or nothing in use.
    """
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise TraceError(f"not a snapshot: its format is not {_FORMAT!r}")
    if plain.get("version") != _VERSION:
        raise TraceError(f"a snapshot of version {plain.get('version')!r:.60}, not {_VERSION}")
    try:
        return _trace(plain, name, device)
    except TraceError:
        raise
    except _MALFORMED as error:
        raise TraceError(f"not a snapshot: {type(error).__name__}: {error}") from None


def _trace(plain: dict[str, Any], name: str, device: int | None) -> Trace:
    # An adaptor's blocks are those of what it is around.
    sources = [found for found in plain["resources"] if not found["upstreams"]]
    memories = sorted({found["memory"] for found in sources})
    if device is not None and not 0 <= device < max(len(memories), 1):
        raise TraceError(f"device is {device}, accepted is 0..{max(len(memories) - 1, 0)}")
    used = {
        memory: [(found, b) for found in sources if found["memory"] == memory for b in _used(found)]
        for memory in memories
    }
    if not any(used.values()):
        raise TraceError("the snapshot shows nothing in use")
    if device is None:
        memory = max(used, key=lambda each: sum(block["requested"] for _, block in used[each]))
    else:
        memory = memories[device]
    blocks = used[memory]
    oldest = max((int(block.get("age_ns", 0)) for _, block in blocks), default=0)
    blocks.sort(key=lambda pair: -int(pair[1].get("age_ns", oldest)))
    recorder = Recorder()
    for found in sources:
        if found["memory"] == memory:
            recorder.hold("counts", int(found["counts"]["reserved"]))
    for found, block in blocks:
        address, age = int(block["address"]), int(block.get("age_ns", oldest))
        recorder.alloc(
            f"block {address:#x}",
            int(found["key"]) << 64 | address,
            int(block["requested"]),
            int(block["stream"]),
            (oldest - age) // 1000,
            _owner(plain["stacks"], found, block),
        )
    meta = {"source": "snapshot", "memory": memory, "moment": True, "ended_us": oldest // 1000}
    return recorder.trace(name, meta)


def _used(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in found["blocks"] if block["state"] == "used"]


def _owner(stacks: list[Any], found: dict[str, Any], block: dict[str, Any]) -> str:
    """Name the tag, else the line of the program, the framework or the resource."""
    if block.get("tag"):
        return str(block["tag"])
    frames = stacks[block["stack"]] if block.get("stack") is not None else ()
    for file, line, function in frames:
        if line:
            return f"{function} ({file}:{line})"
    return str(block.get("framework") or found["name"])

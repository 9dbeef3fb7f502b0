"""Snapshots and events in the form of PyTorch's memory snapshots, which its tools read.

Segments are an arena's regions, blocks without holes; other resources have one segment each.
PyTorch numbers devices: memory of a GPU has its ordinal, and the host's is device 0 as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from gpumem._events.events import Block, Events, Frame
from gpumem._snapshots.resources import ResourceSnapshot, counted_once

_STATES = {"used": "active_allocated", "pending_free": "active_awaiting_free"}
_ACTIONS = {
    "alloc": ("alloc",),
    "free": ("free_requested", "free_completed"),
    "free_requested": ("free_requested",),
    "free_completed": ("free_completed",),
    "failure": ("oom",),
    "reserve": ("segment_alloc",),
    "release": ("segment_free",),
}


def torch_snapshot(
    resources: Sequence[ResourceSnapshot], events: Events | None = None
) -> dict[str, Any]:
    """Return a dict as ``torch.cuda.memory._snapshot`` does."""
    segments = [
        segment
        for found in counted_once(resources)
        for segment in segments_of(device_of(found.memory), found.iter_blocks())
    ]
    devices = 1 + max((segment["device"] for segment in segments), default=0)
    return snapshot_of(segments, _traces(events, devices))


def snapshot_of(
    segments: list[dict[str, Any]], traces: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return a snapshot of segments and of the history of each device."""
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {"backend": "gpumem"},
        "external_annotations": [],
    }


def device_of(memory: str) -> int:
    """Return the ordinal in a memory's name."""
    ordinal = memory.partition("/")[0].partition(":")[2]
    return int(ordinal) if re.fullmatch("[0-9]{1,4}", ordinal) else 0


def segments_of(device: int, blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Return the segments of blocks that are in the order of their regions."""
    frames = _Frames()
    solid = (block for block in blocks if block.state != "hole")
    return [
        _segment(device, list(inside), frames)
        for _, inside in groupby(solid, key=lambda at: at.region)
    ]


def _segment(device: int, blocks: list[Block], frames: _Frames) -> dict[str, Any]:
    active = [block for block in blocks if block.state in _STATES]
    used = [block for block in blocks if block.state == "used"]
    return {
        "device": device,
        "address": blocks[0].address,
        "total_size": sum(block.allocated_nbytes for block in blocks),
        "allocated_size": sum(block.allocated_nbytes for block in used),
        "active_size": sum(block.allocated_nbytes for block in active),
        "requested_size": sum(block.nbytes for block in used),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.allocated_nbytes,
                "requested_size": block.nbytes,
                "state": _STATES.get(block.state, "inactive"),
                "frames": frames.of(block.stack),
            }
            for block in blocks
        ],
    }


class _Frames:
    """Lists of frames, one for each stack: many blocks share it, as in PyTorch's snapshots."""

    def __init__(self) -> None:
        self._made: dict[int, list[dict[str, Any]]] = {}  # by the stack's id: its mapping keeps it

    def of(self, stack: tuple[Frame, ...]) -> list[dict[str, Any]]:
        """Return the list of a stack."""
        if id(stack) not in self._made:
            plain = [{"filename": f.filename, "line": f.line, "name": f.name} for f in stack]
            self._made[id(stack)] = plain
        return self._made[id(stack)]


def _traces(events: Events | None, devices: int) -> list[list[dict[str, Any]]]:
    traces: list[list[dict[str, Any]]] = [[] for _ in range(devices)]
    frames = _Frames()
    for event in events or ():
        device = device_of(event.resource.memory)
        traces += [[] for _ in range(device + 1 - len(traces))]
        for action in _ACTIONS.get(event.action, ()):
            entry = {
                "action": action,
                "addr": event.address,
                "size": event.nbytes or event.allocated_nbytes,
                "stream": event.stream,
                "frames": frames.of(event.stack),
                "time_us": ((events.began if events else 0) + event.time) // 1000,
                "compile_context": "N/A",
                "user_metadata": event.tag or "",
            }
            if action == "oom":
                entry["device_free"] = 0
            traces[device].append(entry)
    return traces

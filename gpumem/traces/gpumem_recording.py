"""Traces from what `gpumem.observe.record` wrote."""

from __future__ import annotations

from collections.abc import Hashable
from typing import IO

import numpy as np

from gpumem.errors import EventFileError, TraceError
from gpumem.observe.events import MAGIC, Events, parse
from gpumem.traces.builder import Recorder
from gpumem.traces.trace import Trace

__all__ = ["MAGIC", "read_recording", "trace_of"]

_ALLOC, _FREE, _FREE_REQUESTED, _FREE_COMPLETED, _FAILURE, _RESERVE, _RELEASE = range(1, 8)
_PER_THREAD_STREAM = 2


def read_recording(file: IO[bytes], name: str, device: int | None = None) -> Trace:
    """Read a trace from an open file of recorded events.

    Parameters
    ----------
    file : binary file
        The events.
    name : str
        Name of the trace.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, the busiest.

    Raises
    ------
    TraceError
        Not a file of recorded events, or no allocation in it.
    """
    try:
        events = parse(file.read())
    except EventFileError as error:
        raise TraceError(str(error)) from None
    return trace_of(events, name, device)


def trace_of(events: Events, name: str, device: int | None = None) -> Trace:
    """Make a trace of the blocks of one memory, whichever resources handed them out."""
    memories = sorted({resource.memory for resource in events.resources.values()})
    if device is not None and not 0 <= device < max(len(memories), 1):
        raise TraceError(f"device is {device}, accepted is 0..{max(len(memories) - 1, 0)}")
    records = events.records[events.records["kind"] <= _RELEASE]
    memory_of = {n: memories.index(found.memory) for n, found in events.resources.items()}
    memory = np.array([memory_of.get(n, -1) for n in records["resource"].tolist()], np.int64)
    allocations = memory[records["kind"] == _ALLOC]
    if device is None and allocations.size:
        device = int(np.bincount(allocations[allocations >= 0], minlength=1).argmax())
    records = records[memory == device]
    recorder = Recorder()
    owners = _Owners(events)
    for row in records.tolist():
        _record_event(recorder, owners, row)
    if not len(recorder):
        of = f" in {memories[device]}" if device is not None else ""
        raise TraceError(f"the recording holds no allocations{of}")
    meta = {
        "source": "gpumem",
        "memory": memories[device or 0] if memories else "",
        "torn": events.torn,
        "lost": events.lost,
    }
    return recorder.trace(name, meta)


def _record_event(recorder: Recorder, owners: _Owners, row: tuple[int, ...]) -> None:
    time, address, nbytes, _, stream, kind, framework, thread, tag, stack, resource = row
    where = f"address {address:#x}"
    if kind == _FAILURE:
        recorder.failure(nbytes)
        return
    if kind in (_RESERVE, _RELEASE):
        recorder.hold(where, nbytes if kind == _RESERVE else -nbytes)
        return
    # An arena inside another's block begins at the same address.
    place = resource << 64 | address
    key: Hashable = (stream, thread) if stream == _PER_THREAD_STREAM else stream
    if kind == _ALLOC:
        # Its free is missing where events were lost.
        recorder.end_life(where, place, key, time // 1000)
        owner = owners.name(tag, stack, framework, resource)
        recorder.alloc(where, place, nbytes, key, time // 1000, owner)
    elif kind == _FREE_REQUESTED:
        recorder.free_requested(where, place, nbytes, key, time // 1000)
    else:
        recorder.free_completed(where, place, nbytes, key, time // 1000)


class _Owners:
    """Names who asked: the tag, else the line of the program, the framework or the resource."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._known: dict[tuple[int, int, int, int], str] = {}

    def name(self, tag: int, stack: int, framework: int, resource: int) -> str:
        key = tag, stack, framework, resource
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, tag: int, stack: int, framework: int, resource: int) -> str:
        events = self._events
        if tag in events.tags:
            return events.tags[tag]
        frames = [frame for frame in events.stacks.get(stack, ()) if frame.line]
        if frames:
            return f"{frames[0].name} ({frames[0].filename}:{frames[0].line})"
        if framework in events.frameworks:
            return events.frameworks[framework]
        return events.resources[resource].name if resource in events.resources else ""

"""Traces from what `gpumem.observe.record` wrote."""

from __future__ import annotations

from collections.abc import Hashable
from typing import IO

import numpy as np

from gpumem.observe.events import MAGIC, EventFileError, Events, parse
from gpumem.replay.recorder import Recorder
from gpumem.replay.trace import Trace, TraceError

__all__ = ["MAGIC", "read_recording", "trace_of"]

_ALLOC, _FREE, _FREE_REQUESTED, _FREE_COMPLETED, _FAILURE = range(1, 6)
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
    records = events.records[events.records["kind"] <= _FAILURE]
    memory_of = {n: memories.index(found.memory) for n, found in events.resources.items()}
    memory = np.array([memory_of.get(n, -1) for n in records["resource"].tolist()], np.int64)
    allocations = memory[records["kind"] == _ALLOC]
    if device is None and allocations.size:
        device = int(np.bincount(allocations[allocations >= 0], minlength=1).argmax())
    records = records[memory == device]
    recorder = Recorder()
    failures = 0
    for row in records.tolist():
        failures += _record_event(recorder, row)
    if not len(recorder):
        raise TraceError("the recording holds no allocations")
    meta = {
        "source": "gpumem",
        "memory": memories[device or 0] if memories else "",
        "failed_allocs": failures,
        "torn": events.torn,
        "lost": events.lost,
    }
    return recorder.trace(name, meta)


def _record_event(recorder: Recorder, row: tuple[int, ...]) -> bool:
    """Record one event; return whether it tells of a failure."""
    time, address, nbytes, _, stream, kind, _, thread, _, _, resource = row
    if kind == _FAILURE:
        return True
    # An arena inside another's block begins at the same address.
    place = resource << 64 | address
    key: Hashable = (stream, thread) if stream == _PER_THREAD_STREAM else stream
    where = f"address {address:#x}"
    if kind == _ALLOC:
        # Its free is missing where events were lost.
        recorder.end_life(where, place, key, time // 1000)
        recorder.alloc(where, place, nbytes, key, time // 1000)
    elif kind == _FREE_REQUESTED:
        recorder.free_requested(where, place, nbytes, key, time // 1000)
    else:
        recorder.free_completed(where, place, nbytes, key, time // 1000)
    return False

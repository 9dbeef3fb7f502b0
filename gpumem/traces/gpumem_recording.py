"""Traces from files that `gpumem.observe.record` wrote."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import IO

import numpy as np

from gpumem.errors import EventFileError, TraceError
from gpumem.observe import Events
from gpumem.observe.events import ALLOC, FAILURE, FREE_REQUESTED, MAGIC, RELEASE, RESERVE, parse
from gpumem.traces.builder import TraceBuilder, owner_named, require_device
from gpumem.traces.trace import Trace

__all__ = ["MAGIC", "read_recording", "trace_of"]

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
        Not a file of recorded events, or a file without allocations.
    """
    try:
        events = parse(file.read())
    except EventFileError as error:
        raise TraceError(str(error)) from None
    return trace_of(events, name, device)


def trace_of(events: Events, name: str, device: int | None = None) -> Trace:
    """Make a trace of the blocks of one memory, from all of its resources."""
    memories = sorted({resource.memory for resource in events.resources.values()})
    require_device(device, len(memories))
    records = events.records[events.records["kind"] <= RELEASE]
    memory_of = {n: memories.index(found.memory) for n, found in events.resources.items()}
    memory = np.array([memory_of.get(n, -1) for n in records["resource"].tolist()], np.int64)
    allocations = memory[records["kind"] == ALLOC]
    if device is None and allocations.size:
        device = int(np.bincount(allocations[allocations >= 0], minlength=1).argmax())
    records = records[memory == device]
    builder = TraceBuilder()
    owner_of = cache(partial(_owner, events))
    for row in records.tolist():
        _record_event(builder, owner_of, row)
    if not len(builder):
        of = f" in {memories[device]}" if device is not None else ""
        raise TraceError(f"the recording holds no allocations{of}")
    meta = {
        "source": "gpumem",
        "memory": memories[device or 0] if memories else "",
        "torn": events.torn,
        "lost": events.lost,
    }
    return builder.trace(name, meta)


def _record_event(
    builder: TraceBuilder, owner_of: Callable[..., str], row: tuple[int, ...]
) -> None:
    time, address, nbytes, _, stream, kind, framework, thread, tag, stack, resource = row
    where = f"address {address:#x}"
    if kind == FAILURE:
        builder.failure(nbytes)
        return
    if kind in (RESERVE, RELEASE):
        builder.hold(where, nbytes if kind == RESERVE else -nbytes)
        return
    # An arena inside a block of another one begins at the same address.
    place = resource << 64 | address
    key: Hashable = (stream, thread) if stream == _PER_THREAD_STREAM else stream
    if kind == ALLOC:
        # The free of the block before is missing if events were lost.
        builder.end_life(where, place, key, time // 1000)
        owner = owner_of(tag, stack, framework, resource)
        builder.alloc(where, place, nbytes, key, time // 1000, owner)
    elif kind == FREE_REQUESTED:
        builder.free_requested(where, place, nbytes, key, time // 1000)
    else:
        builder.free_completed(where, place, nbytes, key, time // 1000)


def _owner(events: Events, tag: int, stack: int, framework: int, resource: int) -> str:
    frames, library = events.stacks.get(stack, ()), events.frameworks.get(framework)
    known = events.resources.get(resource)
    return owner_named(events.tags.get(tag), frames, library, known.name if known else "")

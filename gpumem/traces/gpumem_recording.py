"""Traces from files that `gpumem.observe.record` wrote."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import IO

import numpy as np
from numpy.typing import NDArray

from gpumem._support.texts import shown
from gpumem.errors import EventFileError, TraceError
from gpumem.observe import Block, Events, RecordedResource
from gpumem.observe.events import (
    ALLOC,
    FAILURE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    MAGIC,
    RELEASE,
    RESERVE,
    parse,
)
from gpumem.traces.builder import TraceBuilder, owner_named, require_device
from gpumem.traces.trace import Trace

__all__ = ["MAGIC", "read_recording", "trace_of"]

_PER_THREAD_STREAM = 2
_OLDEST = 1 << 63  # of a block that was allocated before the recording, in nanoseconds


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


def trace_of(
    events: Events,
    name: str,
    device: int | None = None,
    live: Sequence[tuple[RecordedResource, Block]] | None = None,
) -> Trace:
    """Make a trace of the blocks of one memory, from all of its resources.

    Parameters
    ----------
    events : Events
    name : str
        Name of the trace.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, the busiest.
    live : sequence of (RecordedResource, Block), optional
        The blocks that were live at some time between the first event and the last, where earlier
        events are lost; by default those that a file begins with. The trace then begins with those
        that were live at the first event.
    """
    memories = sorted({resource.memory for resource in events.resources.values()})
    require_device(device, len(memories))
    records = events.records[events.records["kind"] <= RELEASE]
    memory_of = {n: memories.index(found.memory) for n, found in events.resources.items()}
    memory = np.array([memory_of.get(n, -1) for n in records["resource"].tolist()], np.int64)
    known = live or events.began_with
    before = _live_before(events, records, known) if known or live is not None else []
    allocations = memory[records["kind"] == ALLOC]
    if not allocations.size:
        allocations = np.array([memory_of[row[-1]] for row in before], np.int64)
    if device is None and allocations.size:
        device = int(np.bincount(allocations[allocations >= 0], minlength=1).argmax())
    records = records[memory == device]
    builder = TraceBuilder()
    owner_of = cache(partial(_owner, events))
    began = int(records["time"].min()) if records.size else 0
    begun = 0
    for owner, address, nbytes, stream, thread, resource in before:
        if memory_of[resource] == device:
            begun += 1
            place, key = resource << 64 | address, _stream_key(stream, thread)
            owner = owner or owner_of(0, 0, 0, resource)
            builder.alloc(f"address {address:#x}", place, nbytes, key, began // 1000, owner)
    for row in records.tolist():
        _record_event(builder, owner_of, row)
    if not len(builder):
        of = f" in {shown(memories[device])}" if memories and device is not None else ""
        raise TraceError(f"the recording holds no allocations{of}")
    meta = {
        "source": "gpumem",
        "memory": memories[device or 0] if memories else "",
        "torn": events.torn,
        "lost": events.lost,
    }
    if live is not None:
        meta["began_with"] = begun
    return builder.trace(name, meta)


_Before = tuple[str, int, int, int, int, int]


def _live_before(
    events: Events,
    records: NDArray[np.void],
    live: Sequence[tuple[RecordedResource, Block]],
) -> list[_Before]:
    """Return the blocks that were live at the first event.

    The first event about an address tells whether it was in use before; an address without an event
    is in use now exactly if it was in use then. Of each block: owner or "", address, bytes, stream,
    thread and number of the resource.
    """
    found: list[_Before] = []
    seen: set[tuple[RecordedResource, int]] = set()
    for row in records[(records["kind"] <= FREE_COMPLETED)].tolist():
        _, address, nbytes, allocated, stream, kind, _, thread, _, _, resource = row
        known = events.resources.get(resource)
        if known is None or (known, address) in seen:
            continue
        seen.add((known, address))
        if kind != ALLOC:  # the completion of a free does not repeat the requested bytes
            found.append(("", address, nbytes or allocated, stream, thread, resource))
    numbers = {resource: number for number, resource in events.resources.items()}
    numbers_of_threads = {thread: number for number, thread in events.threads.items()}
    for resource, block in sorted(live, key=lambda pair: -(pair[1].age or _OLDEST)):
        if resource in numbers and (resource, block.address) not in seen:
            owner = owner_named(block.tag, block.stack, block.framework, resource.name)
            thread = numbers_of_threads.get(block.thread or 0, 0)
            found.append(
                (owner, block.address, block.nbytes, block.stream, thread, numbers[resource])
            )
    return found


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
    key = _stream_key(stream, thread)
    if kind == ALLOC:
        # The free of the block before is missing if events were lost.
        builder.end_life(where, place, key, time // 1000)
        owner = owner_of(tag, stack, framework, resource)
        builder.alloc(where, place, nbytes, key, time // 1000, owner)
    elif kind == FREE_REQUESTED:
        builder.free_requested(where, place, nbytes, key, time // 1000)
    else:
        builder.free_completed(where, place, nbytes, key, time // 1000)


def _stream_key(stream: int, thread: int) -> Hashable:
    return (stream, thread) if stream == _PER_THREAD_STREAM else stream


def _owner(events: Events, tag: int, stack: int, framework: int, resource: int) -> str:
    frames, library = events.stacks.get(stack, ()), events.frameworks.get(framework)
    known = events.resources.get(resource)
    return owner_named(events.tags.get(tag), frames, library, known.name if known else "")

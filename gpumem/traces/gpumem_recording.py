"""Traces from files that `gpumem.observe.record` wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpumem._events.events import (
    ALLOC,
    ASLEEP,
    CATEGORY,
    FAILURE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    MAGIC,
    MOVE,
    PHASE_BEGIN,
    RELEASE,
    RESERVE,
    Block,
    Events,
    RecordedResource,
    parse,
)
from gpumem._events.refusals import RefusedRequest
from gpumem._support.arguments import refuse, require
from gpumem._support.texts import shown
from gpumem.errors import EventFileError, TraceError
from gpumem.traces.builder import TraceBuilder, require_device
from gpumem.traces.frames import owner_named
from gpumem.traces.trace import Frames, Trace

__all__ = ["MAGIC", "read_recording", "traces_of"]

_PER_THREAD_STREAM = 2
_Before: TypeAlias = tuple[int, int, int, Hashable, str, Frames]
"""A block that was live at the first event: resource, place, bytes, stream, owner and frames."""
_NAME_BYTES = 63  # of a resource's name
_EVERY = -2  # the memory of events of the program
_OLDEST = 1 << 63  # of a block that was allocated before the recording, in nanoseconds


def read_recording(file: IO[bytes], name: str, device: int | None = None) -> list[Trace]:
    """Read a trace of each memory from an open file of recorded events.

    Parameters
    ----------
    file : binary file
        The events.
    name : str
        Name of the trace.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, all.

    Raises
    ------
    TraceError
        Not a file of recorded events, or a file without allocations.
    """
    if not hasattr(file, "read"):
        refuse("file", file, "a file that is open to read bytes")
    try:
        events = parse(file.read())
    except EventFileError as error:
        raise TraceError(str(error)) from None
    return traces_of(events, name, device)


def traces_of(
    events: Events,
    name: str,
    device: int | None = None,
    live: Sequence[tuple[RecordedResource, Block]] | None = None,
) -> list[Trace]:
    """Make a trace of each memory that has blocks, of all its resources.

    Parameters
    ----------
    events : Events
    name : str
        Name of the traces.
    device : int, optional
        Which memory to take, by its place among their sorted names; without it, all.
    live : sequence of (RecordedResource, Block), optional
        The blocks that were live at some time between the first event and the last, where earlier
        events are lost; by default those that a file begins with. The traces then begin with those
        that were live at the first event.
    """
    require("events", events, Events, "Events")
    memories = sorted({resource.memory for resource in events.resources.values()})
    require_device(device, len(memories))
    kinds = events.records["kind"]
    is_phase = (kinds >= PHASE_BEGIN) & (kinds <= CATEGORY)
    records = events.records[(kinds <= MOVE) | is_phase]
    memory_of = {n: memories.index(found.memory) for n, found in events.resources.items()}
    memory = np.array([memory_of.get(n, -1) for n in records["resource"].tolist()], np.int64)
    memory[records["kind"] >= PHASE_BEGIN] = _EVERY
    known = live or events.began_with
    before = _live_before(events, records, known) if known or live is not None else []
    until = int(records["time"].max(initial=0)) // 1000
    traces = []
    for number in range(len(memories)) if device is None else [device]:
        memory_name = memories[number] if memories else ""
        begun = [row for row in before if memory_of[row[0]] == number]
        here = records[(memory == number) | (memory == _EVERY)]
        builder = _record(events, memory_name, here, begun)
        if not len(builder):
            continue
        meta = {
            "source": "gpumem",
            "memory": memory_name,
            "torn": events.torn,
            "lost": events.lost,
        }
        if live is not None:
            meta["began_with"] = len(begun)
        traces.append(builder.trace(name, meta, until))
    if not traces:
        of = f" in {shown(memories[device])}" if memories and device is not None else ""
        why = "no block was allocated through gpumem while it ran"
        if events.lost or events.torn:
            why = f"it lacks {events.torn:,} events that it had, and {events.lost:,} that were lost"
        raise TraceError(f"the recording holds no allocations{of}: {why}")
    return traces


def _record(
    events: Events, memory: str, records: NDArray[np.void], begun: Sequence[_Before]
) -> TraceBuilder:
    """Record the events of one memory, which begin with blocks that were live before."""
    builder = TraceBuilder(origin_us=events.began // 1000)
    owner_of = cache(partial(_owner, events))
    began = int(records["time"].min()) if records.size else 0
    for _, place, nbytes, key, owner, frames in begun:
        where = f"place {place:#x}"
        builder.alloc(where, place, nbytes, key, began // 1000, owner, frames)
    builder.begin()
    refused = deque(_refused(events, memory))
    places = [n << 64 for n in np.unique(records["resource"]).tolist()]
    for slot in records.tolist():
        while refused and refused[0].time - events.began <= slot[0]:
            _record_refusal(builder, refused.popleft())
        if slot[5] >= PHASE_BEGIN:
            _record_phase(builder, events.tags, places, slot)
        else:
            _record_event(builder, owner_of, events.stacks, slot)
    for refusal in refused:
        _record_refusal(builder, refusal)
    return builder


def _record_refusal(builder: TraceBuilder, refusal: RefusedRequest) -> None:
    # A thread that Python does not know, such as autograd's, has neither a tag nor frames.
    others = builder.open_phase(), refusal.resource
    owner = owner_named(refusal.owner, refusal.stack, *others)
    builder.refuse(refusal._replace(owner=owner))


def _refused(events: Events, memory: str) -> Iterator[RefusedRequest]:
    """Yield the refused requests of those resources of a memory that are recorded, by time."""
    names = {each.name for each in events.resources.values() if each.memory == memory}
    for refusal in sorted(events.refusals.values(), key=lambda each: each.time):
        here = refusal.memory == memory and refusal.resource[:_NAME_BYTES] in names
        if here and refusal.time >= events.began:  # a process keeps the texts of earlier ones
            yield refusal


def _record_phase(
    builder: TraceBuilder, tags: Mapping[int, str], places: Sequence[int], row: tuple[int, ...]
) -> None:
    """Record a phase, or a category of the blocks that resources have at an address."""
    number, kind, name = row[1], row[5], tags.get(row[8], "unnamed")
    if kind == CATEGORY:
        for place in places:
            builder.categorize(place | number, name, tags.get(row[2], ""))
    elif kind == PHASE_BEGIN:
        builder.phase_begin(number, name)
    else:
        builder.phase_end(number, name)


def _live_before(
    events: Events,
    records: NDArray[np.void],
    live: Sequence[tuple[RecordedResource, Block]],
) -> list[_Before]:
    """Return the blocks that were live at the first event.

    The first event about an address shows whether it was in use before; an address without an event
    is in use now exactly if it was in use then. The beginning of the file may describe a freed
    block with attributes that no event has.
    """
    at_first = {(resource, block.address): block for resource, block in events.began_with}
    found: list[_Before] = []
    seen: set[tuple[RecordedResource, int]] = set()
    for row in records[(records["kind"] <= FREE_COMPLETED)].tolist():
        _, address, nbytes, allocated, stream, kind, _, thread, _, _, resource = row
        known = events.resources.get(resource)
        if known is None or (known, address) in seen:
            continue
        seen.add((known, address))
        if kind != ALLOC:  # the completion of a free does not repeat the requested bytes
            block = at_first.get((known, address))
            of = (known.name, ()) if block is None else (_owner_of(known, block), block.stack)
            place, key = resource << 64 | address, _stream_key(stream, thread)
            found.append((resource, place, nbytes or allocated, key, *of))
    numbers = {resource: number for number, resource in events.resources.items()}
    numbers_of_threads = {thread: number for number, thread in events.threads.items()}
    for resource, block in sorted(live, key=lambda pair: -(pair[1].age or _OLDEST)):
        if resource in numbers and (resource, block.address) not in seen:
            key = _stream_key(block.stream, numbers_of_threads.get(block.thread or 0, 0))
            number, of = numbers[resource], (_owner_of(resource, block), block.stack)
            found.append((number, number << 64 | block.address, block.nbytes, key, *of))
    return found


def _owner_of(resource: RecordedResource, block: Block) -> str:
    return owner_named(block.tag, block.stack, block.framework, resource.name)


def _record_event(
    builder: TraceBuilder,
    owner_of: Callable[..., str],
    stacks: Mapping[int, Frames],
    row: tuple[int, ...],
) -> None:
    time, address, nbytes, _, stream, kind, framework, thread, tag, stack, resource = row
    where = f"address {address:#x}"
    if kind == FAILURE:
        builder.refuse(RefusedRequest(nbytes))
        return
    # An arena inside a block of another one begins at the same address.
    place = resource << 64 | address
    if kind in (RESERVE, RELEASE, MOVE):
        if kind != MOVE:
            builder.hold(where, nbytes if kind == RESERVE else -nbytes, sleeps=stream == ASLEEP)
        # In a move, `stream` is the previous address of the page; 0: the file does not have it.
        if kind == MOVE and stream:
            builder.segment_end(resource << 64 | stream, nbytes)
        if kind == RELEASE:
            builder.segment_end(place, nbytes)
        else:
            builder.segment_begin(place, nbytes)
        return
    key = _stream_key(stream, thread)
    if kind == ALLOC:
        # The free of the block before is missing if events were lost.
        builder.end_life(where, place, key, time // 1000)
        owner = owner_of(tag, stack, framework, resource)
        frames = stacks.get(stack, ())
        builder.alloc(where, place, nbytes, key, time // 1000, owner, frames)
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

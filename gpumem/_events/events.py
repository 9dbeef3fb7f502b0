"""Recorded events, and the file that holds them.

The file, version 1. Everything is little-endian. A header of 96 bytes::

    0   8   "gpumemEV"
    8   4   version, 1
    12  4   bytes of a slot, 48
    16  8   when the recording began: nanoseconds since 1970, UTC
    24  8   process id
    32  8   number of slots, once the recording has ended; 0: it continues, or was killed
    40  8   number of events that could not be written, so far: the disk is full
    48  48  zero

Slots of 48 bytes follow until the end of the file. Where there are fewer than the header says, the
file was cut; files from before the number was written have 0. A slot of kind 0 was begun and never
finished (its writer was killed), or the file was cut before it while it was recorded.
Bytes at the end that do not fill a slot are a part of a slot. Readers skip both. A slot is an
event::

    0   8   time, nanoseconds since the recording began
    8   8   address
    16  8   requested bytes; 0 in free_completed
    24  6   bytes of the block
    30  2   number of the resource
    32  8   handle of the stream; of a move the address that the page left, in older files 0; of
            reserve and release 1 if the memory woke or fell asleep, else 0
    40  1   kind
    41  1   number of the framework that called, 0: none
    42  2   number of the thread
    44  2   number of the tag, 0: none
    46  2   number of the stack, 0: none

======  ==================  ======================================================================
kind    action              what happened
======  ==================  ======================================================================
1       alloc               a block was allocated for the stream
2       free                a block was freed on the stream, which may reuse it at once
3       free_requested      a block was freed while other streams may still use it
4       free_completed      the other streams have completed their use of it
5       failure             an allocation of the requested bytes failed; no address
6       reserve             memory was reserved from the driver: a region, or a page
7       release             memory was released to the driver
8       move                a page was moved to the address: mapped there, or its old mapping there
                            is in use again
9       shrink              a shrink has released the requested bytes
10      reset               the stream was declared to have no unfinished work
11      phase_begin         a phase of the program began: its name is the tag, its number the
                            address; of no resource, 65535
12      phase_end           it ended
13      category            the tag is the purpose of the block that is live at the address, such as
                            "parameters"; at 16 the number of the tag that names the module
                            which has it, 0: none; of no resource
255     (a part of a name)  below
======  ==================  ======================================================================

A part of a name: 40 bytes of text, then kind 255; at 41 what is named (1 a resource, 2 a tag, 3 a
framework, 4 a thread, 5 a stack, 6 blocks that were live at the beginning, 7 a refused request), at
42 the number of the part from 0, at 44 the number that is named, at 46 how many bytes of the text
are left, this part's included. Texts are UTF-8. A resource is ``memory``, ``kind`` and ``name``
with tabs between them; a thread the system's id, in decimal; a stack a JSON array of ``[file, line,
name]``, the innermost first, native frames with line 0; live blocks a JSON array of their
resource's ``memory``, ``kind`` and ``name`` and an array of ``[address, requested bytes, bytes of
the block, stream, framework or null]``; a refused request a JSON object with the fields of
`RefusedRequest`, its time in nanoseconds since 1970. A name stands before its first use, except for
a thread's, which may come later, or not at all. Events may stand before the live blocks.

Events of one block are in order. Those of different threads may stand in a slightly different
order than their times.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from gpumem._events.refusals import RefusedRequest, refusal_of
from gpumem._support.files import open_regular
from gpumem._support.notebooks import html_table
from gpumem._support.sizes import format_size
from gpumem.errors import EventFileError

MAGIC = b"gpumemEV"
VERSION = 1
HEADER_BYTES = 96
SLOT_BYTES = 48

_NAMES = (
    "alloc free free_requested free_completed failure reserve release move shrink reset "
    "phase_begin phase_end category"
)
ACTIONS = dict(enumerate(_NAMES.split(), start=1))
"""Names of the kinds of events."""
ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED, FAILURE, RESERVE, RELEASE, MOVE = range(1, 9)
PHASE_BEGIN, PHASE_END, CATEGORY = range(11, 14)
ASLEEP = 1  # the stream of a reserve or a release, see above

_PART_OF_A_NAME = 255
_TEXT_BYTES = 40
_NAMED = {1: "resources", 2: "tags", 3: "frameworks", 4: "threads", 5: "stacks", 6: "live"}
_NAMED[7] = "refusals"
LIVE = 6
_BLOCK_BITS = np.uint64((1 << 48) - 1)

_SLOT = np.dtype(
    [
        ("time", "<u8"),
        ("address", "<u8"),
        ("nbytes", "<u8"),
        ("allocated_nbytes", "<u8"),  # upper 16 bits: the resource
        ("stream", "<u8"),
        ("kind", "u1"),
        ("framework", "u1"),
        ("thread", "<u2"),
        ("tag", "<u2"),
        ("stack", "<u2"),
    ]
)
EVENT = np.dtype([*((name, _SLOT[name]) for name in _SLOT.names or ()), ("resource", "<u2")])
"""One event in `Events.records`."""


class Frame(NamedTuple):
    """One frame of a stack; a native one has line 0.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> def load():
    ...     return arena.allocate(1000)
    >>> with gpumem.observe.record(arena, stacks=1.0) as recording:
    ...     buffer = load()
    >>> event = next(event for event in recording.events() if event.action == "alloc")
    >>> "load" in [frame.name for frame in event.stack]
    True
    """

    filename: str
    line: int
    name: str


@dataclass(frozen=True)
class Block:
    """One block of a snapshot.

    Attributes
    ----------
    address : int
        Where it begins.
    nbytes : int
        Requested bytes; 0 unless it is used.
    allocated_nbytes : int
        Bytes of the block, padding included.
    state : str
        ``"used"``; ``"free"``; ``"cached"``: freed into a thread's cache; ``"pending_free"``: freed
        while other streams may still use it; ``"hole"``: addresses without memory.
    region : int
        Index in the resource's regions; 0 if it has none.
    stream : int
        Handle of the stream it belongs to, or was freed on; 0 if any stream may have it.
    framework : str or None
        The library that allocated it, if known.
    tag, stack, thread, number, age
        Recorded properties of its allocation: the tag, the frames, the system's id of the thread,
        its number in the recording, and nanoseconds since. None, or no frames, without a recording.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> with gpumem.observe.record(arena), gpumem.observe.tag("weights"):
    ...     buffer = arena.allocate(1000)
    ...     (block,) = arena.snapshot().resources[0].live
    >>> block.nbytes, block.allocated_nbytes, block.owner
    (1000, 1024, 'weights')
    """

    address: int
    nbytes: int
    allocated_nbytes: int
    state: str
    region: int
    stream: int
    framework: str | None = None
    tag: str | None = None
    stack: tuple[Frame, ...] = ()
    thread: int | None = None
    number: int | None = None
    age: int | None = None

    @property
    def owner(self) -> str:
        """The tag, else the framework, else ``"untagged"``."""
        return self.tag or self.framework or "untagged"


@dataclass(frozen=True)
class RecordedResource:
    """A resource, as a recording describes it.

    Attributes
    ----------
    memory : str
        Such as ``"cuda:0"``.
    kind : str
        ``"arena"``, ``"graph pool"``, ``"DriverPool"``, ``"ExternalAllocator"`` or ``"user"``.
    name : str
        The resource's name, up to 63 bytes of it.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host", name="cache")
    >>> with gpumem.observe.record(arena) as recording:
    ...     arena.allocate(1000).close()
    >>> {event.resource for event in recording.events()}
    {RecordedResource(memory='host:0', kind='arena', name='cache')}
    """

    memory: str
    kind: str
    name: str


@dataclass(frozen=True)
class AllocationEvent:
    """One recorded event.

    Attributes
    ----------
    action : str
        One of `ACTIONS`' values; the module's description explains each.
    time : int
        Nanoseconds since the recording began.
    resource : RecordedResource
        The resource of the event.
    address : int
        Of the block or the memory; 0 if there is none.
    nbytes : int
        Requested bytes.
    allocated_nbytes : int
        Bytes of the block, padding included; of a failure the arena's status.
    stream : int
        Handle of the stream; of a move the address that the page left, 0 where an older file does
        not have it; of ``"reserve"`` and ``"release"`` 1 if the memory woke or fell asleep.
    thread : int
        The system's id of the thread; 0 if it is not known.
    tag : str or None
        The thread's `tag` at that time.
    framework : str or None
        The library that called, such as ``"torch"``.
    stack : tuple of Frame
        The frames of the call, the innermost first; empty unless it was sampled.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> with gpumem.observe.record(arena) as recording:
    ...     buffer = arena.allocate(1000)
    >>> event = recording.events()[-1]
    >>> event.action, event.nbytes, event.allocated_nbytes, event.address == buffer.ptr
    ('alloc', 1000, 1024, True)
    """

    action: str
    time: int
    resource: RecordedResource
    address: int
    nbytes: int
    allocated_nbytes: int
    stream: int
    thread: int
    tag: str | None
    framework: str | None
    stack: tuple[Frame, ...]

    def __repr__(self) -> str:
        at = f" at {self.address:#x}" if self.address else ""
        return (
            f"<gpumem.observe.AllocationEvent: {self.action} of {format_size(self.nbytes)}{at} on "
            f"{self.resource.memory}>"
        )

    def _repr_html_(self) -> str:
        rows = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        rows["time"] = f"{self.time / 1e6:,.3f} ms"
        rows["resource"] = " ".join((self.resource.memory, self.resource.kind, self.resource.name))
        rows |= {name: f"{getattr(self, name):#x}" for name in ("address", "stream")}
        rows["nbytes"] = format_size(self.nbytes)
        if self.action != "failure":  # for a failure it is a status
            rows["allocated_nbytes"] = format_size(self.allocated_nbytes)
        rows["stack"] = ", ".join(f"{name} ({file}:{line})" for file, line, name in self.stack)
        return html_table("gpumem.observe.AllocationEvent", rows)


@dataclass(frozen=True)
class Events:
    """Events in the order in which they were written; a sequence of `AllocationEvent`.

    A slice is again `Events`.

    Attributes
    ----------
    records : ndarray of EVENT, shape (events,)
        The same as columns: ``time``, ``address``, ``nbytes``, ``allocated_nbytes``, ``stream``,
        ``kind``, ``framework``, ``thread``, ``tag``, ``stack``, ``resource``; the last five are
        keys of the mappings below.
    resources : mapping of int to RecordedResource
    tags, frameworks : mapping of int to str
    threads : mapping of int to int
        The system's ids.
    stacks : mapping of int to tuple of Frame
    began : int
        Nanoseconds since 1970.
    process : int
        Process id; 0 if it is not known.
    torn : int
        Slots that were begun and never finished, because the process died, or that were
        cut off the end of the file.
    lost : int
        Known number of events that a ring has overwritten or that did not fit in the file.
    began_with : tuple of (RecordedResource, Block)
        Of a file, the blocks that were live at some time between the beginning of the recording and
        its first events.
    refusals : mapping of int to RefusedRequest
        Of requests that were refused for good, each after attempts, which are the events
        "failure"; in the order of their keys.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> with gpumem.observe.record(arena) as recording:
    ...     buffers = [arena.allocate(1000) for _ in range(3)]
    >>> events = recording.events()
    >>> int(events.records["nbytes"][events.records["kind"] == 1].sum())     # 1: alloc
    3000
    """

    records: NDArray[np.void]
    resources: Mapping[int, RecordedResource]
    tags: Mapping[int, str]
    frameworks: Mapping[int, str]
    threads: Mapping[int, int]
    stacks: Mapping[int, tuple[Frame, ...]]
    began: int
    process: int = 0
    torn: int = 0
    lost: int = 0
    began_with: tuple[tuple[RecordedResource, Block], ...] = ()
    refusals: Mapping[int, RefusedRequest] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> AllocationEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Events: ...
    def __getitem__(self, index: int | slice) -> AllocationEvent | Events:
        if isinstance(index, slice):
            return replace(self, records=self.records[index])
        return self._event(self.records[index].item())

    def __iter__(self) -> Iterator[AllocationEvent]:
        for row in self.records.tolist():
            yield self._event(row)

    def __repr__(self) -> str:
        events, resources = len(self), len(self.resources)
        return (
            f"<gpumem.observe.Events: {events} event{'s' * (events != 1)} of "
            f"{resources} resource{'s' * (resources != 1)}>"
        )

    def _event(self, row: tuple[Any, ...]) -> AllocationEvent:
        time, address, nbytes, block, stream, kind, framework, thread, tag, stack, resource = row
        return AllocationEvent(
            ACTIONS.get(kind, f"kind {kind}"),
            time,
            self.resources.get(resource, _UNKNOWN_RESOURCE),
            address,
            nbytes,
            block,
            stream,
            self.threads.get(thread, 0),
            self.tags.get(tag),
            self.frameworks.get(framework),
            self.stacks.get(stack, ()),
        )


_UNKNOWN_RESOURCE = RecordedResource("", "", "")


def read(path: str | os.PathLike[str]) -> Events:
    """Read a file of recorded events; its recording may have ended, continue or have been killed.

    Parameters
    ----------
    path : str or path
        A file that `record` wrote.

    Returns
    -------
    Events

    Raises
    ------
    OSError
        The file cannot be read.
    EventFileError
        It does not hold recorded events, or has a newer version.

    Examples
    --------
    >>> import tempfile, os, gpumem, gpumem.observe
    >>> path = os.path.join(tempfile.mkdtemp(), "events")
    >>> with gpumem.observe.record(path=path):
    ...     gpumem.Arena("host").allocate(1000).close()
    >>> [(event.action, event.nbytes) for event in gpumem.observe.read(path)
    ...  if event.action in ("alloc", "free")]
    [('alloc', 1000), ('free', 1000)]
    """
    with open_regular(path) as file:
        data = file.read()
    try:
        return parse(data)
    except EventFileError as error:
        raise EventFileError(f"{os.fspath(path)!r}: {error}") from None


def parse(data: bytes) -> Events:
    """Make `Events` of a file's bytes; see `read`."""
    if not data or not data.startswith(MAGIC[: len(data)]):
        raise EventFileError("not a file of recorded events: it does not begin with gpumemEV")
    if len(data) < HEADER_BYTES:
        raise EventFileError(
            f"the file of recorded events is torn within its header: it has {len(data)} of "
            f"{HEADER_BYTES} bytes"
        )
    version, slot_bytes = (int.from_bytes(data[at : at + 4], "little") for at in (8, 12))
    if version != VERSION or slot_bytes != SLOT_BYTES:
        raise EventFileError(
            f"the events have version {version} in slots of {slot_bytes} bytes, expected version "
            f"{VERSION} in slots of {SLOT_BYTES}"
        )
    whole = (len(data) - HEADER_BYTES) // SLOT_BYTES
    slots = np.frombuffer(data, _SLOT, whole, HEADER_BYTES)
    # Zeros after the last event are reserved room; other bytes were an event.
    is_torn = any(data[HEADER_BYTES + whole * SLOT_BYTES :])
    cut = max(is_torn, int.from_bytes(data[32:40], "little") - whole)
    return events_of(
        slots,
        names_of(slots),
        cut=cut,
        began=int.from_bytes(data[16:24], "little"),
        process=int.from_bytes(data[24:32], "little"),
        lost=int.from_bytes(data[40:48], "little"),
    )


def events_of(
    slots: NDArray[np.void],
    names: Mapping[str, Mapping[int, str]],
    *,
    began: int,
    process: int,
    lost: int = 0,
    cut: int = 0,
) -> Events:
    """Make `Events` of slots and of the texts that their numbers stand for."""
    finished = np.flatnonzero(slots["kind"])
    last = int(finished[-1]) + 1 if finished.size else 0
    of_events = slots[(slots["kind"] != 0) & (slots["kind"] != _PART_OF_A_NAME)]
    records = np.empty(len(of_events), EVENT)
    for column in _SLOT.names or ():
        records[column] = of_events[column]
    records["resource"] = of_events["allocated_nbytes"] >> np.uint64(48)
    records["allocated_nbytes"] &= _BLOCK_BITS
    records.flags.writeable = False
    return Events(
        records,
        {number: _resource(text) for number, text in names.get("resources", {}).items()},
        dict(names.get("tags", {})),
        dict(names.get("frameworks", {})),
        {n: int(text) for n, text in names.get("threads", {}).items() if _is_number(text)},
        {number: stack_of(text) for number, text in names.get("stacks", {}).items()},
        began,
        process,
        last - finished.size + cut,
        lost,
        tuple(pair for text in names.get("live", {}).values() for pair in _live_of(text)),
        {
            number: found
            for number, text in names.get("refusals", {}).items()
            if (found := refusal_of(text)) is not None
        },
    )


def slots_of(words: NDArray[np.uint64]) -> NDArray[np.void]:
    """View rows of six words as slots."""
    slots: NDArray[np.void] = np.ascontiguousarray(words).view(_SLOT).reshape(-1)
    return slots


def names_of(slots: NDArray[np.void]) -> dict[str, dict[int, str]]:
    """Join the parts of each name; names with a missing part are left out."""
    found: dict[str, dict[int, str]] = {what: {} for what in _NAMED.values()}
    begun: dict[tuple[int, int], tuple[int, bytearray]] = {}  # -> next part, text so far
    parts = slots[slots["kind"] == _PART_OF_A_NAME]
    for slot in parts:
        what, number, part, left = slot[["framework", "tag", "thread", "stack"]].item()
        if part == 0:
            begun[what, number] = 0, bytearray()
        expected, text = begun.get((what, number), (-1, bytearray()))
        if part != expected or what not in _NAMED:
            begun.pop((what, number), None)
            continue
        text += slot.tobytes()[: min(left, _TEXT_BYTES)]
        begun[what, number] = part + 1, text
        if left <= _TEXT_BYTES:
            found[_NAMED[what]][number] = text.decode("utf-8", "replace")
    return found


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,20}", text) is not None


def _resource(text: str) -> RecordedResource:
    fields = text.split("\t", 2)
    return RecordedResource(*fields) if len(fields) == 3 else _UNKNOWN_RESOURCE


def text_of_live(resource: RecordedResource, blocks: Iterable[Block]) -> str:
    """Write live blocks of a resource as the text that `_live_of` reads."""
    rows = [
        (block.address, block.nbytes, block.allocated_nbytes, block.stream, block.framework)
        for block in blocks
    ]
    return json.dumps([resource.memory, resource.kind, resource.name, rows], ensure_ascii=False)


def _live_of(text: str) -> list[tuple[RecordedResource, Block]]:
    """Read live blocks; none of a text that is cut or has another form."""
    found = []
    try:
        memory, kind, name, rows = json.loads(text)
        resource = RecordedResource(str(memory), str(kind), str(name))
        for *numbers, framework in rows:
            address, nbytes, allocated, stream = map(int, numbers)
            if max(nbytes, allocated) > _BLOCK_BITS or not min(address, stream, nbytes) >= 0:
                return []
            if max(address, stream) >> 64:
                return []
            owner = None if framework is None else str(framework)
            block = Block(address, nbytes, allocated, "used", 0, stream, framework=owner)
            found.append((resource, block))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []
    return found


def stack_of(text: str) -> tuple[Frame, ...]:
    """Read a stack; no frames of a text that is cut or is not a stack."""
    try:
        frames = json.loads(text)
        return tuple(Frame(str(file), int(line), str(name)) for file, line, name in frames)
    except (ValueError, TypeError, RecursionError):
        return ()

"""Traces from PyTorch memory snapshots (``torch.cuda.memory._dump_snapshot``), without PyTorch.

A snapshot is a pickle of plain containers: ``{"segments": [...], "device_traces": [[entry, ...],
...], ...}`` with one list of entries per device. Only such plain data is ever built here: a
pickle that names a class or function is refused before it runs anything.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from gpumem._events.refusals import RefusedRequest
from gpumem._support.sizes import format_size
from gpumem._support.texts import shown
from gpumem.errors import TraceError
from gpumem.traces.builder import SegmentLog, TraceBuilder, require_device
from gpumem.traces.torch_entries import BEGIN, END, OOM, Entries, Stacks, integer, load_plain
from gpumem.traces.torch_phases import add_phases
from gpumem.traces.trace import ALLOC, FREE_COMPLETED, FREE_REQUESTED, Trace

MAGIC = b"\x80"


def read_torch_snapshot(file: IO[bytes], name: str, device: int | None = None) -> list[Trace]:
    """Read a trace of each device from an open snapshot pickle; see `traces_of_torch`."""
    snapshot, nbytes, entries = load_plain(file)
    return traces_of_torch(snapshot, nbytes, name, device, entries)


def traces_of_torch(
    snapshot: object,
    nbytes: int,
    name: str,
    device: int | None = None,
    entries: Entries | None = None,
) -> list[Trace]:
    """Make a trace of each device that has allocations, frees or blocks in use.

    The blocks that were live at the first entry begin the trace: those that entries free, and those
    that segments have in use, though no entry allocates them. ``meta["notice"]`` says how many they
    are, and which facts the history lacks. The trace of a snapshot without history allocates the
    blocks in use, like that of gpumem's own snapshots.

    Parameters
    ----------
    snapshot : object
        As PyTorch pickles it, or a list of segments alone.
    nbytes : int
        Bytes of the file, which has at least one for each entry and block.
    name : str
        Name of the trace.
    device : int, optional
        Index of the device to take; without it, all.
    entries : Entries, optional
        The entries of the snapshot that are rows already.

    Raises
    ------
    TraceError
        Not a snapshot, or nothing recorded or in use in it.
    """
    if isinstance(snapshot, list) and snapshot and _is_segment(snapshot[0]):
        snapshot = {"segments": snapshot}
    traces = _device_traces(snapshot)
    _require_plausible("entries", sum(map(len, traces)), nbytes)
    segments = _segments(snapshot, nbytes)
    known = max(len(traces), *(index + 1 for index in segments), 1)
    require_device(device, known)
    if not any(traces):
        return _traces_of_moment(segments, name, device)
    known_entries = Entries() if entries is None else entries
    found = []
    for index in range(known) if device is None else [device]:
        listed = traces[index] if index < len(traces) else []
        history = _History(listed, index, known_entries)
        builder, notice = history.record(segments.get(index, []))
        if len(builder):
            add_phases(builder, snapshot)
            meta = {"source": "torch_snapshot", "device": index, "notice": notice}
            found.append(builder.trace(name, meta))
    return found or _traces_of_moment({}, name, device)


def _is_segment(value: object) -> bool:
    return isinstance(value, dict) and "blocks" in value


def _require_plausible(what: str, count: int, nbytes: int) -> None:
    """Refuse one list that stands for many: a pickle can be far smaller than its objects."""
    if count > nbytes:
        raise TraceError(f"damaged pickle: {count} {what} in {nbytes} bytes")


def _device_traces(snapshot: object) -> list[list[object]]:
    """Return the lists of entries, one per device, or raise TraceError."""
    if not isinstance(snapshot, dict) or not (
        "device_traces" in snapshot or snapshot.get("segments")
    ):
        raise TraceError("the pickle is not a memory snapshot: it has no device_traces or segments")
    # Snapshots of PyTorch before 2.0 have no history.
    traces = snapshot.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(entries, list) for entries in traces):
        raise TraceError("the snapshot's device_traces is not a list of lists")
    if not traces and not snapshot.get("segments"):
        raise TraceError("the snapshot names no device")
    return traces


# ---- segments ------------------------------------------------------------------------------------


def _segments(snapshot: object, nbytes: int) -> dict[int, list[dict[Any, Any]]]:
    """Return the segments of each device, or raise TraceError."""
    segments = snapshot.get("segments", []) if isinstance(snapshot, dict) else []
    if not isinstance(segments, list):
        raise TraceError(f"the snapshot's segments are {shown(segments)}, expected a list")
    found: dict[int, list[dict[Any, Any]]] = {}
    for index, segment in enumerate(segments):
        where = f"segment {index}"
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            raise TraceError(f"{where} is {shown(segment)}, expected a dict with a list of blocks")
        found.setdefault(integer(segment, "device", where, default=0), []).append(segment)
    blocks = sum(len(segment["blocks"]) for inside in found.values() for segment in inside)
    _require_plausible("blocks", blocks, nbytes)
    return found


def _traces_of_moment(
    segments: dict[int, list[dict[Any, Any]]], name: str, device: int | None
) -> list[Trace]:
    """Make traces that allocate the blocks in use and free nothing."""
    found = []
    for index in sorted(segments) if device is None else [device]:
        if len(builder := _record_segments(segments.get(index, []), index)):
            meta = {"source": "torch_snapshot", "device": index, "moment": True}
            found.append(builder.trace(name, meta))
    if not found:
        raise TraceError(
            f"the snapshot has no allocation and no block in use of device {device or 0}: call "
            "torch.cuda.memory._record_memory_history() before the work that it is to show"
        )
    return found


def _record_segments(segments: list[dict[Any, Any]], device: int) -> TraceBuilder:
    """Record segments and the blocks in use."""
    builder = TraceBuilder(of_torch=True)
    stacks = Stacks()
    for index, segment in enumerate(segments):
        where = f"device {device}, segment {index}"
        # An arena inside a block of another one begins at the same address.
        address, nbytes = _extent(segment, where)
        builder.hold(where, nbytes)
        builder.segment_begin(index << 64 | address, nbytes)
    for index, segment in enumerate(segments):
        where = f"device {device}, segment {index}"
        for block in _active(segment, where):
            if block.allocated:
                stack = stacks.number_of(block.frames)
                of = stacks.owners[stack], stacks.frames[stack]
                place = index << 64 | block.address
                builder.alloc(where, place, block.nbytes, block.stream, 0, *of)
    return builder


def _extent(segment: dict[Any, Any], where: str) -> tuple[int, int]:
    """Return the address and the bytes of a segment."""
    return integer(segment, "address", where), integer(segment, "total_size", where)


class _Active(NamedTuple):
    """A block in use; one that is not `allocated` waits for work of other streams to be freed."""

    address: int
    nbytes: int
    stream: int
    frames: object
    allocated: bool


_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")


def _active(segment: dict[Any, Any], where: str) -> Iterator[_Active]:
    """Iterate over the blocks in use of a segment."""
    stream = integer(segment, "stream", where, default=0)
    address = integer(segment, "address", where)
    for block in segment["blocks"]:
        if not isinstance(block, dict):
            raise TraceError(f"{where}: a block is {shown(block)}, expected a dict")
        size = integer(block, "size", where)
        # Before PyTorch 2.1 blocks have neither addresses nor the requested sizes.
        address = integer(block, "address", where, default=address)
        if (state := block.get("state")) in _STATES:
            requested = integer(block, "requested_size", where, default=size)
            frames = block.get("frames")
            yield _Active(address, requested, stream, frames, state == _STATES[0])
        address += size


# ---- a history -----------------------------------------------------------------------------------

BEFORE = "before the recording"
_MIN_RING = 100  # a full ring of entries often has a round number of them, this at least


class _History:
    """The entries of a device, in columns."""

    def __init__(self, listed: list[object], device: int, entries: Entries) -> None:
        rows = np.array(
            [
                entries.row_of(entry, f"device {device}, entry {index}")
                for index, entry in enumerate(listed)
            ],
            np.int64,
        )
        self.device = device
        self.stacks = entries.stacks
        self.action = np.array(entries.action, np.int8)[rows]
        self.address = np.array(entries.address, np.uint64)[rows]
        self.size = np.array(entries.size, np.int64)[rows]
        self.stream = np.array(entries.stream, np.uint64)[rows]
        self.time_us = np.array(entries.time_us, np.int64)[rows]
        self.stack = np.array(entries.stack, np.int32)[rows]

    def record(self, segments: list[dict[Any, Any]]) -> tuple[TraceBuilder, str]:
        """Record all entries after the blocks that were live at the first one.

        Returns
        -------
        builder : TraceBuilder
        notice : str
            Facts that the history lacks.
        """
        # Without frees (skip_actions) lives are too long to tell purposes.
        builder = TraceBuilder(of_torch=self._has(FREE_COMPLETED) or self._has(FREE_REQUESTED))
        active: dict[int, _Active] = {}
        for index, segment in enumerate(segments):
            for block in _active(segment, f"device {self.device}, segment {index}"):
                # Of blocks inside each other the outer one is listed first.
                active.setdefault(block.address, block)
        self._begin_segments(builder, segments)
        times = self.time_us[self.action <= FREE_COMPLETED]
        began, late = (int(times[0]), int(times.max())) if times.size else (0, 0)
        before = self._before(active)
        for block in before:
            self._alloc(builder, block, began)
        builder.begin()
        ended, extents = self._record_entries(builder, before)
        for index, segment in enumerate(segments):
            where = f"device {self.device}, segment {index}"
            for address in extents.remove(*_extent(segment, where)) if extents else ():
                if address not in active:
                    ended += builder.end_life(where, address, 0, late)
        for block in active.values():  # allocated after the last entry of their address
            if not builder.is_live(block.address):
                self._alloc(builder, block, late)
        begun = set(self.address[self.action == BEGIN].tolist())
        lacks_segments = any(
            bool(segment.get("frames")) and segment["address"] not in begun
            for segment in segments
            if not segment.get("is_expandable")
        )
        return builder, self._notice(before, ended, lacks_segments)

    def _alloc(self, builder: TraceBuilder, block: _Active, at: int) -> None:
        """Record a block that no entry allocates."""
        stack = self.stacks.number_of(block.frames)
        of = self.stacks.owners[stack] or BEFORE, self.stacks.frames[stack]
        place = block.address, block.nbytes, block.stream
        builder.alloc(f"device {self.device}", *place, at, *of)

    def _begin_segments(self, builder: TraceBuilder, segments: list[dict[Any, Any]]) -> None:
        """Record the segments at the first entry: the listed ones, with all entries undone."""
        log = SegmentLog()
        for index, segment in enumerate(segments):
            where = f"device {self.device}, segment {index}"
            log.begin(*_extent(segment, where), 0)
        of_segments = np.isin(self.action, (BEGIN, END)) & (self.address > 0)
        columns = (each[of_segments][::-1] for each in (self.action, self.address, self.size))
        for action, address, nbytes in zip(*(each.tolist() for each in columns), strict=True):
            change = log.begin if action == END else log.end
            change(address, nbytes, 0)
        for address, nbytes in log.present():
            builder.hold(f"device {self.device}", nbytes)
            builder.segment_begin(address, nbytes)

    def _before(self, active: dict[int, _Active]) -> list[_Active]:
        """Return the blocks that were live at the first entry.

        The first entry about an address shows whether it was in use before; an address without an
        entry is in use now exactly if it was in use then.
        """
        rows = np.flatnonzero(self.action <= FREE_COMPLETED)
        addresses, first = np.unique(self.address[rows], return_index=True)
        known = np.isin(np.array([*active], np.uint64), addresses)
        found = [block for block, has in zip(active.values(), known, strict=True) if not has]
        rows = np.sort(rows[first])
        rows = rows[self.action[rows] != ALLOC]
        columns = (each[rows].tolist() for each in (self.address, self.size, self.stream))
        rest = zip(*columns, strict=True)
        return found + [_Active(at, size, stream, None, True) for at, size, stream in rest]

    def _record_entries(
        self, builder: TraceBuilder, before: list[_Active]
    ) -> tuple[int, _Extents | None]:
        """Record all entries; return how many frees they lack, and the live blocks if all."""
        # If `skip_actions` left out completions, requests stand for them. Without both, a block
        # lives until its addresses are allocated again or released to the driver.
        ends = FREE_COMPLETED if self._has(FREE_COMPLETED) else FREE_REQUESTED
        extents = None if self._has(ends) else _Extents(before)
        ended = 0
        columns = self.action, self.address, self.size, self.stream, self.time_us, self.stack
        rows = zip(*(column.tolist() for column in columns), strict=True)
        owners, frames = self.stacks.owners, self.stacks.frames
        for index, (action, address, size, stream, time_us, stack) in enumerate(rows):
            where = f"device {self.device}, entry {index}"
            if action in (ALLOC, END) and extents:
                for other in extents.remove(address, size):
                    ended += builder.end_life(where, other, stream, time_us)
            if action == ALLOC:
                if extents:
                    extents.add(address, size)
                ended += builder.end_life(where, address, stream, time_us)
                of = owners[stack], frames[stack]
                builder.alloc(where, address, size, stream, time_us, *of)
            elif action == ends:
                builder.free_completed(where, address, size, stream, time_us)
            elif action == FREE_REQUESTED:
                builder.free_requested(where, address, size, stream, time_us)
            elif action in (BEGIN, END):
                builder.hold(where, size if action == BEGIN else -size)
                if address:
                    change = builder.segment_begin if action == BEGIN else builder.segment_end
                    change(address, size)
            elif action == OOM:
                device = f"device {self.device}"
                by = {"owner": owners[stack], "stack": frames[stack]}
                builder.refuse(RefusedRequest(size, memory=device, device_free=address, **by))
        return ended, extents

    def _has(self, action: int) -> bool:
        return bool(np.any(self.action == action))

    def _notice(self, before: list[_Active], ended: int, lacks_segments: bool) -> str:
        """Say which facts the history lacks, such as segments that PyTorch reserved meanwhile."""
        entries, texts = len(self.action), []
        allocates = self._has(ALLOC)
        if before:
            blocks = f"{len(before):,} block{'s were' if len(before) > 1 else ' was'}"
            nbytes = format_size(sum(block.nbytes for block in before))
            texts.append(
                f"{blocks} live before the first entry of the file, with {nbytes}: the peak until "
                "then is not known."
            )
        # PyTorch has the frames of a block or segment only if it recorded when that was allocated;
        # entries of segments may be skipped, however.
        known = allocates and any(block.frames for block in before)
        digits = len(str(entries).rstrip("0"))
        is_round = digits == 1 or entries % 1000 == 0 or entries.bit_count() == 1
        full = entries >= _MIN_RING and is_round
        if before and (known or full or lacks_segments):
            verb, lost = ("overflowed", "are") if known else ("may have overflowed", "may be")
            texts.append(
                f"The ring of {entries:,} entries {verb} (max_entries of _record_memory_history): "
                f"older entries {lost} lost."
            )
        if not allocates and (self._has(FREE_REQUESTED) or self._has(FREE_COMPLETED)):
            texts.append(
                "The file has no allocations (skip_actions): blocks are shown from its begin."
            )
        elif allocates and not self._has(FREE_COMPLETED) and self._has(FREE_REQUESTED):
            texts.append(
                "The file has no completions of frees (skip_actions): requests stand for them."
            )
        elif ended:
            texts.append(
                f"{ended:,} free{'s are' if ended > 1 else ' is'} missing (skip_actions): those "
                "blocks are shown until their memory is allocated again, or until the end."
            )
        return " ".join(texts)


class _Extents:
    """The blocks of a history without frees, by address: an allocation ends those in its place."""

    def __init__(self, blocks: Iterable[_Active]) -> None:
        self._nbytes = {block.address: block.nbytes for block in blocks}
        self._places = sorted(self._nbytes)

    def add(self, address: int, nbytes: int) -> None:
        """Add a block that overlaps no other one."""
        insort(self._places, address)
        self._nbytes[address] = nbytes

    def remove(self, address: int, nbytes: int) -> list[int]:
        """Remove the blocks in a range of addresses, and return their addresses."""
        places = self._places
        first, stop = (bisect_left(places, at) for at in (address, address + max(nbytes, 1)))
        if first and places[first - 1] + self._nbytes[places[first - 1]] > address:
            first -= 1
        removed = places[first:stop]
        del places[first:stop]
        return removed

"""Traces from PyTorch memory snapshots (``torch.cuda.memory._dump_snapshot``), without PyTorch.

A snapshot is a pickle of plain containers: ``{"segments": [...], "device_traces": [[entry, ...],
...], ...}`` with one list of entries per device. Only such plain data is ever built here: a
pickle that names a class or function is refused before it runs anything.
"""

from __future__ import annotations

from typing import IO, Any, NamedTuple

import numpy as np

from gpumem._events.refusals import RefusedRequest
from gpumem._support.sizes import format_size
from gpumem._support.texts import shown
from gpumem.errors import TraceError
from gpumem.traces.builder import SegmentLog, TraceBuilder, require_device
from gpumem.traces.torch_entries import BEGIN, END, ENTRY, OOM, Entries, Stacks, integer, load_plain
from gpumem.traces.torch_phases import add_phases
from gpumem.traces.trace import ALLOC, FREE_COMPLETED, FREE_REQUESTED, Trace

MAGIC = b"\x80"


def read_torch_snapshot(file: IO[bytes], name: str, device: int | None = None) -> list[Trace]:
    """Read a trace of each device from an open snapshot pickle; see `traces_of_torch`."""
    snapshot, nbytes, entries = load_plain(file)
    return traces_of_torch(snapshot, entries, nbytes, name, device)


def traces_of_torch(
    snapshot: object, entries: Entries, nbytes: int, name: str, device: int | None = None
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
    entries : Entries
        The entries of the snapshot that are rows already; others are added.
    nbytes : int
        Bytes of the file, which has at least one for each entry and block.
    name : str
        Name of the trace.
    device : int, optional
        Index of the device to take; without it, all.

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
    found = []
    for index in range(known) if device is None else [device]:
        listed = traces[index] if index < len(traces) else []
        history = _History(listed, f"device {index}", entries)
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


class _Block(NamedTuple):
    """A block in use; one that is not `allocated` waits for work of other streams to be freed."""

    address: int
    nbytes: int
    stream: int
    frames: object = None
    allocated: bool = True


class _Segment(NamedTuple):
    """A segment with its blocks in use; `recorded` if the history should have an entry for it."""

    address: int
    nbytes: int
    blocks: list[_Block]
    recorded: bool


_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")


def _segments(snapshot: object, nbytes: int) -> dict[int, list[_Segment]]:
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
    _require_plausible("blocks", sum(len(segment["blocks"]) for segment in segments), nbytes)
    return {
        device: [_segment(each, f"device {device}, segment {n}") for n, each in enumerate(inside)]
        for device, inside in found.items()
    }


def _segment(segment: dict[Any, Any], where: str) -> _Segment:
    stream = integer(segment, "stream", where, default=0)
    begin = address = integer(segment, "address", where)
    blocks = []
    for block in segment["blocks"]:
        if not isinstance(block, dict):
            raise TraceError(f"{where}: a block is {shown(block)}, expected a dict")
        size = integer(block, "size", where)
        # Before PyTorch 2.1 blocks have neither addresses nor the requested sizes.
        address = integer(block, "address", where, default=address)
        if (state := block.get("state")) in _STATES:
            requested = integer(block, "requested_size", where, default=size)
            frames = block.get("frames")
            blocks.append(_Block(address, requested, stream, frames, state == _STATES[0]))
        address += size
    # Mappings of expandable segments are entries of their own.
    recorded = bool(segment.get("frames")) and not segment.get("is_expandable")
    return _Segment(begin, integer(segment, "total_size", where), blocks, recorded)


def _traces_of_moment(
    segments: dict[int, list[_Segment]], name: str, device: int | None
) -> list[Trace]:
    """Make traces that allocate the blocks in use and free nothing."""
    found = []
    for index in sorted(segments) if device is None else [device]:
        if len(builder := _record_segments(segments.get(index, []), f"device {index}")):
            meta = {"source": "torch_snapshot", "device": index, "moment": True}
            found.append(builder.trace(name, meta))
    if not found:
        raise TraceError(
            f"the snapshot has no allocation and no block in use of device {device or 0}: call "
            "torch.cuda.memory._record_memory_history() before the work that it is to show"
        )
    return found


def _record_segments(segments: list[_Segment], where: str) -> TraceBuilder:
    """Record segments and the blocks in use."""
    builder = TraceBuilder(of_torch=True)
    stacks = Stacks()
    # An arena inside a block of another one begins at the same address.
    for index, segment in enumerate(segments):
        builder.hold(where, segment.nbytes)
        builder.segment_begin(index << 64 | segment.address, segment.nbytes)
    for index, segment in enumerate(segments):
        for block in segment.blocks:
            if block.allocated:
                place = index << 64 | block.address
                _allocate(builder, where, stacks, block._replace(address=place), 0)
    return builder


def _allocate(
    builder: TraceBuilder, where: str, stacks: Stacks, block: _Block, time_us: int, owner: str = ""
) -> None:
    """Record a block that no entry allocates; without frames it has the given owner."""
    stack = stacks.number_of(block.frames)
    place = block.address, block.nbytes, block.stream
    builder.alloc(where, *place, time_us, stacks.owners[stack] or owner, stacks.frames[stack])


# ---- a history -----------------------------------------------------------------------------------

BEFORE = "before the recording"
_MIN_RING = 100  # a full ring of entries often has a round number of them, this at least


class _History:
    """The entries of a device, in columns."""

    def __init__(self, listed: list[object], device: str, entries: Entries) -> None:
        numbers = [entries.row_of(each, f"{device}, entry {n}") for n, each in enumerate(listed)]
        rows = np.frombuffer(entries.packed, ENTRY)[np.array(numbers, np.int64)]
        self.device = device
        self.stacks = entries.stacks
        self.address, self.size, self.stream, self.time_us, self.stack, self.action = (
            np.ascontiguousarray(rows[name]) for name in ENTRY.names or ()
        )

    def record(self, segments: list[_Segment]) -> tuple[TraceBuilder, str]:
        """Record all entries after the blocks that were live at the first one.

        Returns
        -------
        builder : TraceBuilder
        notice : str
            Facts that the history lacks.
        """
        # Without frees (skip_actions) lives are too long to tell purposes.
        builder = TraceBuilder(of_torch=self._has(FREE_COMPLETED) or self._has(FREE_REQUESTED))
        active: dict[int, _Block] = {}
        for block in (block for segment in segments for block in segment.blocks):
            # Of blocks inside each other the outer one is listed first.
            active.setdefault(block.address, block)
        self._begin_segments(builder, segments)
        times = self.time_us[self.action <= FREE_COMPLETED]
        began, late = (int(times[0]), int(times.max())) if times.size else (0, 0)
        before = self._before(active)
        for block in before:
            _allocate(builder, self.device, self.stacks, block, began, BEFORE)
        builder.begin()
        ended, extents = self._record_entries(builder, before)
        for segment in segments:
            for address in extents.end(segment.address, segment.nbytes, 0):
                if address not in active:
                    ended += builder.end_life(self.device, address, 0, late)
        for block in active.values():  # allocated after the last entry of their address
            if not builder.is_live(block.address):
                _allocate(builder, self.device, self.stacks, block, late, BEFORE)
        begun = set(self.address[self.action == BEGIN].tolist())
        lacks = any(each.recorded and each.address not in begun for each in segments)
        return builder, self._notice(before, ended, lacks)

    def _begin_segments(self, builder: TraceBuilder, segments: list[_Segment]) -> None:
        """Record the segments at the first entry: the listed ones, with all entries undone."""
        log = SegmentLog()
        for segment in segments:
            log.begin(segment.address, segment.nbytes, 0)
        of_segments = np.isin(self.action, (BEGIN, END)) & (self.address > 0)
        columns = (each[of_segments][::-1] for each in (self.action, self.address, self.size))
        for action, address, nbytes in zip(*(each.tolist() for each in columns), strict=True):
            change = log.begin if action == END else log.end
            change(address, nbytes, 0)
        for address, nbytes in log.present():
            builder.hold(self.device, nbytes)
            builder.segment_begin(address, nbytes)

    def _before(self, active: dict[int, _Block]) -> list[_Block]:
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
        return [*found, *map(_Block, *columns)]

    def _record_entries(
        self, builder: TraceBuilder, before: list[_Block]
    ) -> tuple[int, SegmentLog]:
        """Record all entries; return how many frees they lack, and the live blocks if all."""
        # If `skip_actions` left out completions, requests stand for them. Without both, a block
        # lives until its addresses are allocated again or released to the driver.
        ends = FREE_COMPLETED if self._has(FREE_COMPLETED) else FREE_REQUESTED
        lacks_frees = not self._has(ends)
        extents = SegmentLog()
        for block in before if lacks_frees else ():
            extents.begin(block.address, block.nbytes, 0)
        ended = 0
        columns = self.action, self.address, self.size, self.stream, self.time_us, self.stack
        rows = zip(*(column.tolist() for column in columns), strict=True)
        owners, frames = self.stacks.owners, self.stacks.frames
        for index, (action, address, size, stream, time_us, stack) in enumerate(rows):
            where = f"{self.device}, entry {index}"
            if lacks_frees and action in (ALLOC, END):
                for other in extents.end(address, size, 0):
                    ended += builder.end_life(where, other, stream, time_us)
            if action == ALLOC:
                if lacks_frees:
                    extents.begin(address, size, 0)
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
                by = {"owner": owners[stack], "stack": frames[stack]}
                builder.refuse(RefusedRequest(size, memory=self.device, device_free=address, **by))
        return ended, extents

    def _has(self, action: int) -> bool:
        return bool(np.any(self.action == action))

    def _notice(self, before: list[_Block], ended: int, lacks_segments: bool) -> str:
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

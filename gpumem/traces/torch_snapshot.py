"""Traces from PyTorch memory snapshots (``torch.cuda.memory._dump_snapshot``), without PyTorch.

A snapshot is a pickle of plain containers: ``{"segments": [...], "device_traces": [[entry, ...],
...], ...}`` with one list of entries per device. Only such plain data is ever built here: a
pickle that names a class or function is refused before it runs anything.
"""

from __future__ import annotations

import pickle
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

from gpumem._support.sizes import format_size
from gpumem._support.texts import reason, shown, visible
from gpumem.errors import TraceError
from gpumem.traces.builder import SegmentLog, TraceBuilder, require_device
from gpumem.traces.trace import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    MAX_SIZE,
    Frames,
    Trace,
)

MAGIC = b"\x80"


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, str, bytes, numbers and None, which need no import; refuses others."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise TraceError(f"the pickle names {shown(f'{module}.{name}')}, expected plain data only")

    def persistent_load(self, pid: object) -> NoReturn:
        raise TraceError("the pickle refers to outside objects, expected plain data only")


def read_torch_snapshot(file: IO[bytes], name: str, device: int | None = None) -> list[Trace]:
    """Read a trace of each device from an open snapshot pickle; see `traces_of_torch`."""
    snapshot, nbytes = _load_plain(file)
    return traces_of_torch(snapshot, nbytes, name, device)


def traces_of_torch(
    snapshot: object, nbytes: int, name: str, device: int | None = None
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
        history = _History(traces[index] if index < len(traces) else [], index)
        builder, notice = history.record(segments.get(index, []))
        if len(builder):
            meta = {"source": "torch_snapshot", "device": index, "notice": notice}
            found.append(builder.trace(name, meta))
    return found or _traces_of_moment({}, name, device)


def _is_segment(value: object) -> bool:
    return isinstance(value, dict) and "blocks" in value


def _load_plain(file: IO[bytes]) -> tuple[object, int]:
    """Return the object in the pickle, and the number of its bytes."""
    try:
        nbytes = _check_sizes(file)
        return _PlainUnpickler(file).load(), nbytes
    except TraceError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise TraceError(f"damaged pickle: {reason(error)}") from None


# Arguments of pickle's opcodes: fixed bytes; a length of n bytes, then that many bytes; lines.
_FIXED = {ord(code): size for code, size in zip("qhKMJrjG", (1, 1, 1, 2, 4, 4, 4, 8), strict=True)}
_FIXED |= {0x80: 1, 0x82: 1, 0x83: 2, 0x84: 4, 0x95: 8}
_COUNTED = {ord("U"): 1, ord("C"): 1, 0x8C: 1, 0x8A: 1, ord("T"): 4, ord("X"): 4, ord("B"): 4}
_COUNTED |= {0x8B: 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
_LINES = dict.fromkeys(map(ord, "FILSVgpP"), 1) | dict.fromkeys(map(ord, "ci"), 2)
_PUT, _LONG_BINPUT, _FRAME, _STOP = ord("p"), ord("r"), 0x95, ord(".")


def _check_sizes(file: IO[bytes]) -> int:
    """Refuse a pickle that names more bytes than it has, or a number of an object above them.

    The unpickler allocates all bytes that are named, and a list as long as the highest number, so
    ten bytes could exhaust the memory. The file's position does not change. Returns its bytes.
    """
    start = file.tell()
    data = file.read()
    file.seek(start)
    at, end = 0, len(data)
    while at < end and data[at] != _STOP:
        code = data[at]
        at += 1
        begin = at
        if code in _FIXED:
            at += _FIXED[code]
        elif code in _COUNTED:
            size = _COUNTED[code]
            at += size + int.from_bytes(data[at : at + size], "little")
        else:
            for _ in range(_LINES.get(code, 0)):
                newline = data.find(b"\n", at)
                at = end if newline < 0 else newline + 1
        frame = int.from_bytes(data[begin:at], "little") if code == _FRAME else 0
        if at + frame > end:
            raise TraceError(f"damaged pickle: {end} bytes of at least {at + frame}")
        if code == _LONG_BINPUT:
            number = int.from_bytes(data[begin:at], "little")
        elif code == _PUT:
            text = data[begin:at].strip()
            number = int(text) if text.isdigit() and len(text) < 20 else end + 1
        else:
            continue
        if number > end:
            raise TraceError(f"damaged pickle: object number {number} in {end} bytes")
    return end


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
        found.setdefault(_integer(segment, "device", where, default=0), []).append(segment)
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
    builder = TraceBuilder()
    callers = _Callers()
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
                owner, frames = callers.of(block.frames)
                place = index << 64 | block.address
                builder.alloc(where, place, block.nbytes, block.stream, 0, owner, frames)
    return builder


def _extent(segment: dict[Any, Any], where: str) -> tuple[int, int]:
    """Return the address and the bytes of a segment."""
    return _integer(segment, "address", where), _integer(segment, "total_size", where)


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
    stream = _integer(segment, "stream", where, default=0)
    address = _integer(segment, "address", where)
    for block in segment["blocks"]:
        if not isinstance(block, dict):
            raise TraceError(f"{where}: a block is {shown(block)}, expected a dict")
        size = _integer(block, "size", where)
        # Before PyTorch 2.1 blocks have neither addresses nor the requested sizes.
        address = _integer(block, "address", where, default=address)
        if (state := block.get("state")) in _STATES:
            requested = _integer(block, "requested_size", where, default=size)
            frames = block.get("frames")
            yield _Active(address, requested, stream, frames, state == _STATES[0])
        address += size


# ---- a history -----------------------------------------------------------------------------------

BEFORE = "before the recording"
_MIN_RING = 1000  # a ring of entries has a round number of them, this at least
_BLOCKS = ALLOC, FREE_REQUESTED, FREE_COMPLETED
_BEGIN, _END, _OOM, _OTHER = range(3, 7)
_ACTIONS = {
    "alloc": ALLOC,
    "free_requested": FREE_REQUESTED,
    "free_completed": FREE_COMPLETED,
    "segment_alloc": _BEGIN,
    "segment_map": _BEGIN,
    "segment_free": _END,
    "segment_unmap": _END,
    "oom": _OOM,
}


class _History:
    """The entries of a device, in columns: a large snapshot has millions."""

    def __init__(self, entries: list[object], device: int) -> None:
        self.device = device
        self.action = array("b")
        self.address = array("Q")
        self.size = array("q")
        self.stream = array("Q")
        self.time_us = array("q")
        self.frames: list[object] = []  # of allocations
        for index, entry in enumerate(entries):
            self._add(entry, f"device {device}, entry {index}")

    def _add(self, entry: object, where: str) -> None:
        if not isinstance(entry, dict):
            raise TraceError(f"{where} is a {type(entry).__name__}, expected a dict")
        name = entry.get("action")
        if not isinstance(name, str):
            raise TraceError(f"{where}: action is {shown(name)}, expected a str")
        action = _ACTIONS.get(name, _OTHER)
        address = size = stream = time_us = 0
        if action in (_BEGIN, _END):
            address = _integer(entry, "addr", where, default=0)  # snapshots need not name it
        elif action in _BLOCKS:
            address, stream = _integer(entry, "addr", where), _integer(entry, "stream", where)
            # Snapshots of PyTorch before 2.1 carry no times.
            time_us = _integer(entry, "time_us", where, default=0)
        if action != _OTHER:
            size = _integer(entry, "size", where)
        self.action.append(action)
        self.address.append(address)
        self.size.append(size)
        self.stream.append(stream)
        self.time_us.append(time_us)
        if action == ALLOC:
            self.frames.append(entry.get("frames"))

    def record(self, segments: list[dict[Any, Any]]) -> tuple[TraceBuilder, str]:
        """Record all entries after the blocks that were live at the first one.

        Returns
        -------
        builder : TraceBuilder
        notice : str
            Facts that the history lacks.
        """
        builder, callers = TraceBuilder(), _Callers()
        active: dict[int, _Active] = {}
        for index, segment in enumerate(segments):
            for block in _active(segment, f"device {self.device}, segment {index}"):
                # Of blocks inside each other the outer one is listed first.
                active.setdefault(block.address, block)
        self._begin_segments(builder, segments)
        times = [time for at, time in zip(self.action, self.time_us, strict=True) if at in _BLOCKS]
        before = self._before(active)
        for block in before:
            self._alloc(builder, callers, block, times[0] if times else 0)
        ended, extents = self._record_entries(builder, callers, before)
        for index, segment in enumerate(segments):
            where = f"device {self.device}, segment {index}"
            for address in extents.remove(*_extent(segment, where)) if extents else ():
                if address not in active:
                    ended += builder.end_life(where, address, 0, max(times))
        for block in active.values():  # allocated after the last entry of their address
            if not builder.is_live(block.address):
                self._alloc(builder, callers, block, max(times, default=0))
        return builder, self._notice(before, ended)

    def _alloc(self, builder: TraceBuilder, callers: _Callers, block: _Active, at: int) -> None:
        """Record a block that no entry allocates."""
        owner, frames = callers.of(block.frames)
        place = block.address, block.nbytes, block.stream
        builder.alloc(f"device {self.device}", *place, at, owner or BEFORE, frames)

    def _begin_segments(self, builder: TraceBuilder, segments: list[dict[Any, Any]]) -> None:
        """Record the segments at the first entry: the listed ones, with all entries undone."""
        log = SegmentLog()
        for index, segment in enumerate(segments):
            where = f"device {self.device}, segment {index}"
            log.begin(*_extent(segment, where), 0)
        for row in range(len(self.action) - 1, -1, -1):
            if self.action[row] in (_BEGIN, _END) and self.address[row]:
                change = log.begin if self.action[row] == _END else log.end
                change(self.address[row], self.size[row], 0)
        for address, nbytes in log.present():
            builder.hold(f"device {self.device}", nbytes)
            builder.segment_begin(address, nbytes)

    def _before(self, active: dict[int, _Active]) -> list[_Active]:
        """Return the blocks that were live at the first entry.

        The first entry about an address shows whether it was in use before; an address without an
        entry is in use now exactly if it was in use then.
        """
        action = np.frombuffer(self.action, np.int8)
        rows = np.flatnonzero(action <= FREE_COMPLETED)
        named = np.frombuffer(self.address, np.uint64)[rows]
        addresses, first = np.unique(named, return_index=True)
        known = np.isin(np.array([*active], np.uint64), addresses)
        found = [block for block, has in zip(active.values(), known, strict=True) if not has]
        for row in np.sort(rows[first]).tolist():
            if self.action[row] != ALLOC:
                place = self.address[row], self.size[row], self.stream[row]
                found.append(_Active(*place, None, True))
        return found

    def _record_entries(
        self, builder: TraceBuilder, callers: _Callers, before: list[_Active]
    ) -> tuple[int, _Extents | None]:
        """Record all entries; return how many frees they lack, and the live blocks if all."""
        # If `skip_actions` left out completions, requests stand for them. Without both, a block
        # lives until its addresses are allocated again or released to the driver.
        ends = FREE_COMPLETED if self._has(FREE_COMPLETED) else FREE_REQUESTED
        extents = None if self._has(ends) else _Extents(before)
        ended = 0
        columns = self.action, self.address, self.size, self.stream, self.time_us
        frames = iter(self.frames)
        for index, row in enumerate(zip(*columns, strict=True)):
            where = f"device {self.device}, entry {index}"
            action, address, size, stream, time_us = row
            if action in (ALLOC, _END) and extents:
                for other in extents.remove(address, size):
                    ended += builder.end_life(where, other, stream, time_us)
            if action == ALLOC:
                if extents:
                    extents.add(address, size)
                ended += builder.end_life(where, address, stream, time_us)
                owner, stack = callers.of(next(frames))
                builder.alloc(where, address, size, stream, time_us, owner, stack)
            elif action == ends:
                builder.free_completed(where, address, size, stream, time_us)
            elif action == FREE_REQUESTED:
                builder.free_requested(where, address, size, stream, time_us)
            elif action in (_BEGIN, _END):
                builder.hold(where, size if action == _BEGIN else -size)
                if address:
                    change = builder.segment_begin if action == _BEGIN else builder.segment_end
                    change(address, size)
            elif action == _OOM:
                builder.failure(size)
        return ended, extents

    def _has(self, action: int) -> bool:
        return action in self.action

    def _notice(self, before: list[_Active], ended: int) -> str:
        """Say which facts the history lacks."""
        entries, texts = len(self.action), []
        allocates = self._has(ALLOC)
        if before:
            blocks = f"{len(before):,} block{'s were' if len(before) > 1 else ' was'}"
            nbytes = format_size(sum(block.nbytes for block in before))
            texts.append(
                f"{blocks} live before the first entry of the file, with {nbytes}: the peak until "
                "then is not known."
            )
        # PyTorch has the frames of a block only if it recorded when the block was allocated.
        known = allocates and any(block.frames for block in before)
        full = entries >= _MIN_RING and (entries % _MIN_RING == 0 or entries.bit_count() == 1)
        if before and (known or full):
            texts.append(
                f"The ring of {entries:,} entries {'overflowed' if known else 'may have overflowed'}"
                " (max_entries of _record_memory_history): older entries are lost."
            )
        if not allocates and (self._has(FREE_REQUESTED) or self._has(FREE_COMPLETED)):
            texts.append("It has no allocations (skip_actions): blocks are shown from its begin.")
        elif allocates and not self._has(FREE_COMPLETED) and self._has(FREE_REQUESTED):
            texts.append("It has no completions of frees (skip_actions): requests stand for them.")
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


class _Callers:
    """Owners and stacks of entries. Many share one list of frames, which is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Frames]] = {}  # by the list's id: the snapshot keeps it

    def of(self, frames: object) -> tuple[str, Frames]:
        """Return the owner and the stack of a list of frames."""
        if id(frames) not in self._known:
            stack = _stack(frames)
            self._known[id(frames)] = _owner(stack), stack
        return self._known[id(frames)]


def _stack(frames: object) -> Frames:
    """Read a list of frames, at most `_MAX_FRAMES`; entries that are not frames are left out."""
    if not isinstance(frames, list):
        return ()
    return tuple(
        (f"{file:.{_MAX_NAME}}", _line(frame), _name(frame))
        for frame in frames[:_MAX_FRAMES]
        if isinstance(frame, dict) and isinstance(file := frame.get("filename"), str)
    )


_MAX_FRAMES = 256
_MAX_NAME = 300


def _name(frame: dict[Any, Any]) -> str:
    name = frame.get("name")
    return visible(f"{name:.{_MAX_NAME}}") if isinstance(name, str) else shown(name)


def _line(frame: dict[Any, Any]) -> int:
    line = frame.get("line")
    return line if isinstance(line, int) and 0 <= line < 1 << 31 else 0


def _owner(stack: Frames) -> str:
    """Name the innermost line of Python outside of PyTorch, else the innermost; "" without one."""
    lines = [frame for frame in stack if frame[0].endswith(".py")]
    outside = [line for line in lines if "/torch/" not in line[0]]
    for file, line, name in (outside or lines)[:1]:
        return f"{name} ({file:.200}:{line})"
    return ""


def _integer(entry: dict[Any, Any], key: str, where: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int):
        raise TraceError(f"{where}: {key} is {shown(value)}, expected an integer")
    limit = _LIMITS.get(key, MAX_SIZE)
    if not 0 <= value <= limit:
        raise TraceError(f"{where}: {key} is {shown(value)}, expected 0..{limit}")
    return value


_LIMITS = dict.fromkeys(("addr", "address", "stream"), (1 << 64) - 1)
_LIMITS |= {"time_us": 1 << 62, "device": 1 << 20}

"""Traces from PyTorch memory snapshots (``torch.cuda.memory._dump_snapshot``), without PyTorch.

A snapshot is a pickle of plain containers: ``{"segments": [...], "device_traces": [[entry, ...],
...], ...}`` with one list of entries per device. Only such plain data is ever built here: a
pickle that names a class or function is refused before it runs anything.
"""

from __future__ import annotations

import pickle
from typing import IO, Any, NoReturn

from gpumem._support.texts import reason, shown, visible
from gpumem.errors import TraceError
from gpumem.traces.builder import TraceBuilder, require_device
from gpumem.traces.trace import Frames, Trace

MAGIC = b"\x80"

_TIME_LIMIT_US = 1 << 62


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, str, bytes, numbers and None, which need no import; refuses others."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise TraceError(f"the pickle names {shown(f'{module}.{name}')}, expected plain data only")

    def persistent_load(self, pid: object) -> NoReturn:
        raise TraceError("the pickle refers to outside objects, expected plain data only")


def read_torch_snapshot(file: IO[bytes], name: str, device: int | None = None) -> list[Trace]:
    """Read a trace of each device from an open snapshot pickle.

    Allocations that were live before recording began are not part of the trace; their frees
    are, as frees of an unknown block. The trace of a snapshot without history allocates the blocks
    in use, like that of gpumem's own snapshots.

    Parameters
    ----------
    file : binary file
        The pickle.
    name : str
        Name of the trace.
    device : int, optional
        Index of the device to take; without it, all that have allocations or frees.

    Raises
    ------
    TraceError
        Not a snapshot, nothing recorded or in use in it, or a pickle that names a class or
        function.
    """
    snapshot, nbytes = _load_plain(file)
    traces = _device_traces(snapshot)
    _require_plausible("entries", sum(map(len, traces)), nbytes)
    found = []
    for index, entries in enumerate(traces):
        if device in (None, index) and len(builder := _record(entries, index)):
            found.append(builder.trace(name, {"source": "torch_snapshot", "device": index}))
    if found:
        return found
    # If a history was recorded, the blocks in use do not stand for it.
    segments = {} if any(traces) else _segments(snapshot, nbytes)
    known = max(len(traces), *(index + 1 for index in segments), 1)
    require_device(device, known)
    return _traces_of_moment(segments, name, device)


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


# ---- a snapshot without history ------------------------------------------------------------------


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
        nbytes = _integer(segment, "total_size", f"device {device}")
        builder.hold(where, nbytes)
        # An arena inside a block of another one begins at the same address.
        builder.segment_begin(index << 64 | _integer(segment, "address", where), nbytes)
    for index, segment in enumerate(segments):
        where = f"device {device}, segment {index}"
        stream = _integer(segment, "stream", where, default=0)
        address = _integer(segment, "address", where)
        for block in segment["blocks"]:
            if not isinstance(block, dict):
                raise TraceError(f"{where}: a block is {shown(block)}, expected a dict")
            size = _integer(block, "size", where)
            # Before PyTorch 2.1 blocks have neither addresses nor the requested sizes.
            address = _integer(block, "address", where, default=address)
            if block.get("state") == "active_allocated":
                requested = _integer(block, "requested_size", where, default=size)
                place = index << 64 | address
                owner, frames = callers.of(block.get("frames"))
                builder.alloc(where, place, requested, stream, 0, owner, frames)
            address += size
    return builder


def _record(entries: list[object], device: int) -> TraceBuilder:
    """Record the entries of blocks, segments and failures; others are left out."""
    builder = TraceBuilder()
    callers = _Callers()
    for index, entry in enumerate(entries):
        where = f"device {device}, entry {index}"
        if not isinstance(entry, dict):
            raise TraceError(f"{where} is a {type(entry).__name__}, expected a dict")
        action = entry.get("action")
        if not isinstance(action, str):
            raise TraceError(f"{where}: action is {shown(action)}, expected a str")
        if action in _OF_BLOCKS:
            _record_block(builder, where, action, entry, callers)
        elif action in _OF_SEGMENTS:
            _record_segment(builder, where, _OF_SEGMENTS[action], entry)
        elif action == "oom":
            builder.failure(_integer(entry, "size", where))
    return builder


_OF_BLOCKS = ("alloc", "free_requested", "free_completed")
_OF_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _record_segment(builder: TraceBuilder, where: str, sign: int, entry: dict[Any, Any]) -> None:
    nbytes = _integer(entry, "size", where)
    builder.hold(where, sign * nbytes)
    address = _integer(entry, "addr", where, default=0)
    if address <= 0:  # snapshots need not name it
        return
    if sign > 0:
        builder.segment_begin(address, nbytes)
    else:
        builder.segment_end(address, nbytes)


def _record_block(
    builder: TraceBuilder, where: str, action: str, entry: dict[Any, Any], callers: _Callers
) -> None:
    address, size, stream = (_integer(entry, key, where) for key in ("addr", "size", "stream"))
    # Snapshots of PyTorch before 2.1 carry no times.
    time_us = _integer(entry, "time_us", where, default=0)
    if action == "alloc":
        owner, frames = callers.of(entry.get("frames"))
        builder.alloc(where, address, size, stream, time_us, owner, frames)
    elif action == "free_requested":
        builder.free_requested(where, address, size, stream, time_us)
    else:
        builder.free_completed(where, address, size, stream, time_us)


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
    if not isinstance(value, int) or not -_TIME_LIMIT_US <= value < 1 << 64:
        raise TraceError(f"{where}: {key} is {shown(value)}, expected an integer")
    if key == "time_us" and value >= _TIME_LIMIT_US:
        raise TraceError(f"{where}: time_us is {value}, expected 0..{_TIME_LIMIT_US}")
    return value

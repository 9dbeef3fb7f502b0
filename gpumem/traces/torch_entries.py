"""The entries of PyTorch's memory snapshots in columns, as they are unpickled.

A large snapshot has millions of entries, each with a list of frames of its own. An entry becomes a
row as soon as it is read, and its list of frames is emptied.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from typing import IO, Any, NoReturn

import numpy as np

from gpumem._support.closing import collector_off
from gpumem._support.texts import reason, shown, visible
from gpumem.errors import TraceError
from gpumem.traces._pickle_pieces import Pieces
from gpumem.traces.frames import owner_named
from gpumem.traces.trace import ALLOC, FREE_COMPLETED, FREE_REQUESTED, MAX_SIZE, Frames

BLOCKS = ALLOC, FREE_REQUESTED, FREE_COMPLETED
BEGIN, END, OOM, OTHER = range(3, 7)
_ACTIONS = {
    "alloc": ALLOC,
    "free_requested": FREE_REQUESTED,
    "free_completed": FREE_COMPLETED,
    "segment_alloc": BEGIN,
    "segment_map": BEGIN,
    "segment_free": END,
    "segment_unmap": END,
    "oom": OOM,
}
_PACKED = struct.Struct("<QqQqib")
ENTRY = np.dtype("<u8, <i8, <u8, <i8, <i4, i1")
"""Address, size, stream, time, number of the stack, and action of an entry."""
_MAX_FRAMES = 256
_MAX_NAME = 300


def load_plain(file: IO[bytes]) -> tuple[object, int, Entries]:
    """Return the object in a pickle, the number of its bytes, and the entries in it."""
    start = file.tell()
    nbytes = file.seek(0, os.SEEK_END) - start
    file.seek(start)
    try:
        with collector_off():
            unpickler = _PlainUnpickler(Pieces(file, nbytes))
            return unpickler.load(), nbytes, unpickler.entries
    except TraceError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise TraceError(f"damaged pickle: {reason(error)}") from None


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, str, bytes, numbers and None, which need no import; refuses others."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        self.entries = Entries()

    def find_class(self, module: str, name: str) -> NoReturn:
        raise TraceError(f"the pickle names {shown(f'{module}.{name}')}, expected plain data only")

    def persistent_load(self, filled: Any) -> Any:
        """Make a row of a dict that was filled, if it is a correct entry, and a list of a tuple."""
        if type(filled) is tuple:
            return list(filled)  # the hash of nested tuples would recurse
        if type(filled) is dict and "action" in filled:
            with contextlib.suppress(TraceError):  # raised again with its place
                return _Known(self.entries.row_of(filled, ""))
        return filled


class _Known(int):
    """Stands for an entry that is a row, or for the frames of a list."""

    __slots__ = ()


class Entries:
    """The entries of all devices, packed as rows of `ENTRY`; their stacks are numbered."""

    def __init__(self) -> None:
        self.stacks = Stacks()
        self.packed = bytearray()

    def row_of(self, entry: object, where: str) -> int:
        """Return the row of an entry."""
        if type(entry) is _Known:
            return entry
        if not isinstance(entry, dict):
            raise TraceError(f"{where} is a {type(entry).__name__}, expected a dict")
        name = entry.get("action")
        if not isinstance(name, str):
            raise TraceError(f"{where}: action is {shown(name)}, expected a str")
        action = _ACTIONS.get(name, OTHER)
        address = size = stream = time_us = 0
        if action in (BEGIN, END):
            address = integer(entry, "addr", where, default=0)  # snapshots need not name it
        elif action in BLOCKS:
            address, stream = integer(entry, "addr", where), integer(entry, "stream", where)
            # Snapshots of PyTorch before 2.1 carry no times.
            time_us = integer(entry, "time_us", where, default=0)
        elif action == OOM:
            address = integer(entry, "device_free", where, default=0)
        if action != OTHER:
            size = integer(entry, "size", where)
        stack = self.stacks.number_of(entry.get("frames"))
        self.packed += _PACKED.pack(address, size, stream, time_us, stack, action)
        return len(self.packed) // _PACKED.size - 1


class Stacks:
    """The different stacks of lists of frames, with their owners."""

    def __init__(self) -> None:
        self.frames: list[Frames] = [()]
        self.owners = [""]
        self._numbers: dict[Frames, int] = {(): 0}
        self._by_ids: dict[tuple[int, ...], _Known] = {}
        self._kept: list[list[Any]] = []  # so that no other object gets the same id

    def number_of(self, frames: object) -> int:
        """Return the number of a stack, 0 for none; the list holds that number from then on."""
        if not isinstance(frames, list) or not frames:
            return 0
        if type(frames[0]) is _Known:
            return frames[0]
        key = tuple(map(id, frames))
        if key not in self._by_ids:
            stack = _stack(frames)
            if stack not in self._numbers:
                self._numbers[stack] = len(self.frames)
                self.frames.append(stack)
                self.owners.append(owner_named("", stack))
            self._by_ids[key] = _Known(self._numbers[stack])
            self._kept.append(list(frames))
        number = self._by_ids[key]
        frames[:] = (number,)
        return number


def _stack(frames: list[Any]) -> Frames:
    """Read a list of frames, at most `_MAX_FRAMES`; entries that are not frames are left out."""
    return tuple(
        (f"{file:.{_MAX_NAME}}", _line(frame), _name(frame))
        for frame in frames[:_MAX_FRAMES]
        if isinstance(frame, dict) and isinstance(file := frame.get("filename"), str)
    )


def _name(frame: dict[Any, Any]) -> str:
    name = frame.get("name")
    return visible(f"{name:.{_MAX_NAME}}") if isinstance(name, str) else shown(name)


def _line(frame: dict[Any, Any]) -> int:
    line = frame.get("line")
    return line if isinstance(line, int) and 0 <= line < 1 << 31 else 0


_LIMITS = dict.fromkeys(("addr", "address", "stream"), (1 << 64) - 1)
_LIMITS |= {"time_us": 1 << 62, "device": 1 << 20}


def integer(entry: dict[Any, Any], key: str, where: str, default: int | None = None) -> int:
    """Return a number of an entry, a segment or a block, or raise TraceError."""
    value = entry.get(key, default)
    if not isinstance(value, int):
        raise TraceError(f"{where}: {key} is {shown(value)}, expected an integer")
    limit = _LIMITS.get(key, MAX_SIZE)
    if not 0 <= value <= limit:
        raise TraceError(f"{where}: {key} is {shown(value)}, expected 0..{limit}")
    return value

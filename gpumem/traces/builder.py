"""Turns addresses in a log into block numbers: an address means a block only while it lives."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpumem._events.refusals import RefusedRequest
from gpumem._support.arguments import is_integer, require
from gpumem.errors import TraceError
from gpumem.traces.categories import (
    CATEGORIES,
    RANKS,
    categories_of,
    has_passes,
    likely_category,
    modules_of,
    steps_of,
)
from gpumem.traces.trace import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    MAX_LIVE,
    MAX_SIZE,
    MAX_STREAMS,
    UNKNOWN_BLOCK,
    Curve,
    Details,
    Frames,
    Phase,
    Segments,
    Trace,
    lives_of,
)

_ADDRESS_BITS = (1 << 64) - 1


class TraceBuilder:
    """Collects the events of a log that names blocks by address, and makes a trace of them.

    Addresses become block numbers by lifetime. Streams are numbered from 0 in the order in which
    they are first seen. Time starts at 0 and never decreases, although threads that log
    concurrently may write their times in a slightly different order than their events. Addresses
    and owners of blocks become the details of the trace.

    `origin_us` is the log's time 0 in microseconds since 1970, if that is known. The
    trace's ``meta["first_us"]`` is the time of the first event, by which traces of several devices
    or processes are put side by side.

    `of_torch` says that the log is of PyTorch, so that the names of its phases tell the purposes of
    blocks. Of another log they do if it has a category of at least one block.

    Each call takes `where`, the position in the log for error messages, such as ``"line 7"``.
    """

    def __init__(self, origin_us: int = 0, *, of_torch: bool = False) -> None:
        self._of_torch = of_torch
        self._origin_us = origin_us
        self._action = array("b")
        self._block = array("i")
        self._size = array("q")
        self._stream = array("h")
        self._time_us = array("q")
        self._live: dict[int, int] = {}  # address -> block number
        self._sizes = array("q")  # by block number
        self._streams: dict[Hashable, int] = {}  # handle -> stream number
        self._addresses = array("Q")  # by block number, as are owners
        self._owner = array("i")
        self._owners: dict[str, int] = {}
        self._held = array("q")  # bytes held from the driver, by change
        self._held_at = array("q")  # events before each change
        self._asleep = array("q")  # bytes that went to sleep, by change of those held
        self._holding = 0  # the sum of the changes
        self._refusals: list[tuple[int, RefusedRequest]] = []
        self._stack = array("i")  # by block number; -1: none
        self._stacks: dict[Frames, int] = {}
        self._known_stacks: dict[int, tuple[int, Frames]] = {}  # by the id of the frames kept here
        self._segments = SegmentLog()
        self._first = 0  # events before the log
        self._phases: list[list[Any]] = []  # name, events before its begin and its end
        self._open: dict[Hashable, list[Any]] = {}  # those that have not ended
        self._category = array("b")  # by block number, as is the module; -1: not known
        self._module = array("i")
        self._modules: dict[str, int] = {}

    def __len__(self) -> int:
        """Events recorded so far."""
        return len(self._action)

    def alloc(
        self,
        where: str,
        address: int,
        size: int,
        stream: Hashable,
        time_us: int,
        owner: str = "",
        frames: Frames = (),
    ) -> None:
        """Record that `size` bytes at `address` were allocated on `stream`, by `owner`.

        Many allocations may share one tuple of frames, which is then compared once.
        """
        if not 0 <= size <= MAX_SIZE:
            raise TraceError(f"{where}: size is {size}, expected 0..{MAX_SIZE} bytes")
        if address in self._live:
            raise TraceError(
                f"{where}: {address:#x} is allocated while block {self._live[address]} lives "
                f"there, expected an address that was freed"
            )
        block = len(self._sizes)
        self._live[address] = block
        self._sizes.append(size)
        self._addresses.append(address & _ADDRESS_BITS)
        self._owner.append(self._owners.setdefault(owner, len(self._owners)))
        self._stack.append(self._stack_number(frames))
        self._category.append(-1)
        self._module.append(-1)
        self._append(where, ALLOC, block, size, stream, time_us)

    def free_requested(
        self, where: str, address: int, size: int, stream: Hashable, time_us: int
    ) -> None:
        """Record that the program freed the block at `address`."""
        self._free(where, FREE_REQUESTED, self._live.get(address), size, stream, time_us)

    def free_completed(
        self, where: str, address: int, size: int, stream: Hashable, time_us: int
    ) -> None:
        """Record that the memory at `address` can be allocated again."""
        self._free(where, FREE_COMPLETED, self._live.pop(address, None), size, stream, time_us)

    def end_life(self, where: str, address: int, stream: Hashable, time_us: int) -> bool:
        """Record a free that the log lacks, if a block is live at `address`; return whether."""
        if address not in self._live:
            return False
        self.free_completed(where, address, 0, stream, time_us)
        return True

    def is_live(self, address: int) -> bool:
        """Return whether a block is live at `address`."""
        return address in self._live

    def hold(self, where: str, nbytes: int, *, sleeps: bool = False) -> None:
        """Record that memory was reserved from the driver; negative: released to it.

        `sleeps`: because live blocks woke, or went to sleep.
        """
        if abs(nbytes) > MAX_SIZE:
            raise TraceError(f"{where}: size is {abs(nbytes)}, expected 0..{MAX_SIZE} bytes")
        self._holding += nbytes
        if abs(self._holding) > MAX_LIVE:
            raise TraceError(f"{where}: {self._holding} bytes are held, expected 0..{MAX_LIVE}")
        self._held_at.append(len(self))
        self._held.append(nbytes)
        self._asleep.append(-nbytes if sleeps else 0)

    def segment_begin(self, address: int, nbytes: int) -> None:
        """Record that memory lies at `address` from here on."""
        self._segments.begin(address, nbytes, len(self))

    def segment_end(self, address: int, nbytes: int) -> None:
        """Record that no memory lies at these addresses any more; it may be part of a segment."""
        self._segments.end(address, nbytes, len(self))

    def refuse(self, refusal: RefusedRequest) -> None:
        """Record that a request was refused; with figures it replaces the attempts before it."""
        require("refusal", refusal, RefusedRequest, "a RefusedRequest")
        kept = self._refusals
        while refusal.memory and kept and kept[-1][1] == RefusedRequest(refusal.nbytes):
            kept.pop()
        kept.append((len(self), refusal))

    def begin(self) -> None:
        """Record that the log begins here: the blocks so far were live before."""
        self._first = len(self)

    def phase_begin(self, number: Hashable, name: str) -> None:
        """Record that a phase began; the number means it until its end."""
        self._open[number] = [name, len(self), None]
        self._phases.append(self._open[number])

    def phase_end(self, number: Hashable, name: str) -> None:
        """Record that a phase ended, which may have begun before the log."""
        if number not in self._open:  # those that end later are around it
            self._phases.insert(0, [name, self._first, len(self)])
        else:
            self._open.pop(number)[2] = len(self)

    def open_phase(self) -> str:
        """Return the name of the phase that began last and has not ended; "": none."""
        return str(next(reversed(self._open.values()), [""])[0])

    def add_phase(self, name: str, begin: int, end: int) -> None:
        """Record a phase by the numbers of events before its begin and its end."""
        self._phases.append([name, max(begin, self._first), end])

    def events_until(self, times_us: Sequence[int]) -> list[int]:
        """Return the number of recorded events up to each time of the log."""
        rising = np.maximum.accumulate(np.array(self._time_us, np.int64))
        found: list[int] = np.searchsorted(rising, times_us, side="right").tolist()
        return found

    def allocations(self) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Frames]]:
        """Return event and stack of the log's allocations, and the stacks; -1: none."""
        begun = np.flatnonzero(np.array(self._action) == ALLOC)
        stacks = np.array(self._stack, np.int64)
        return begun[self._first :], stacks[self._first :], [*self._stacks]

    def categorize(self, address: int, name: str, module: str = "") -> None:
        """Record category and module of the block that is live at `address`, if there is one."""
        block, rank = self._live.get(address), RANKS.get(name, -1)
        if block is not None and rank > self._category[block]:
            self._category[block] = rank
            if module:
                self._module[block] = self._modules.setdefault(module, len(self._modules))

    def _stack_number(self, frames: Frames) -> int:
        if not frames:
            return -1
        if id(frames) not in self._known_stacks:
            number = self._stacks.setdefault(frames, len(self._stacks))
            self._known_stacks[id(frames)] = number, frames
        return self._known_stacks[id(frames)][0]

    def _free(
        self, where: str, action: int, block: int | None, size: int, stream: Hashable, time_us: int
    ) -> None:
        if block is None:  # allocated before recording began: its size is not checked
            size = min(max(size, 0), MAX_SIZE)
            self._append(where, action, UNKNOWN_BLOCK, size, stream, time_us)
        else:
            self._append(where, action, block, self._sizes[block], stream, time_us)

    def _append(
        self, where: str, action: int, block: int, size: int, stream: Hashable, time_us: int
    ) -> None:
        number = self._streams.setdefault(stream, len(self._streams))
        if number >= MAX_STREAMS:
            raise TraceError(f"{where}: more than {MAX_STREAMS} streams")
        self._action.append(action)
        self._block.append(block)
        self._size.append(size)
        self._stream.append(number)
        self._time_us.append(time_us)

    def trace(self, name: str, meta: Mapping[str, Any], until_us: int = 0) -> Trace:
        """Make a trace of the recorded events; the log went on to `until_us` of its time."""
        time_us = np.array(self._time_us, dtype=np.int64)
        if time_us.size:
            time_us = np.maximum.accumulate(time_us - time_us[0]).clip(min=0)
        details = self._details()
        first = self._time_us[0] if self._time_us else 0
        facts = {**meta, "failed_allocs": len(self._refusals), "first_us": self._origin_us + first}
        if until_us > first:
            facts["ended_us"] = until_us - first
        columns = self._action, self._block, self._size, self._stream
        action, block, size, stream = map(np.array, columns)
        steps = np.array(steps_of(details.phases), np.int64)
        return Trace(action, block, size, stream, time_us, steps, facts, name, details)

    def _details(self) -> Details:
        at = np.array(self._held_at, np.int64)
        held = Curve(at, np.cumsum(self._held, dtype=np.int64))
        asleep = Curve(at, np.cumsum(self._asleep, dtype=np.int64)) if any(self._asleep) else None
        phases = tuple(self._ended_phases())
        category = None
        told = max(self._category, default=-1) >= 0
        if told or (self._of_torch and has_passes(phases)):
            category = self._categories(phases)
        return Details(
            np.array(self._addresses, np.uint64),
            np.array(self._owner, np.int32),
            tuple(self._owners),
            tuple(map(_stream_name, self._streams)),
            held if held.at.size else None,
            tuple(self._refusals),
            np.array(self._stack, np.int32) if self._stacks else None,
            tuple(self._stacks),
            self._segments.columns(),
            asleep,
            phases,
            category,
            CATEGORIES if category is not None else (),
            *self._modules_of_blocks(),
        )

    def _modules_of_blocks(self) -> tuple[NDArray[np.int32] | None, tuple[str, ...]]:
        """Return the module of each block, as the log has it or by its stack, and their names."""
        known = self._modules
        names = map(modules_of, self._stacks)
        by_stack = [known.setdefault(name, len(known)) if name else -1 for name in names]
        if not known:
            return None, ()
        told, stack = np.array(self._module, np.int32), np.array(self._stack, np.int64)
        return np.where(told < 0, np.array([*by_stack, -1], np.int32)[stack], told), tuple(known)

    def _categories(self, phases: tuple[Phase, ...]) -> NDArray[np.int32]:
        lives = lives_of(np.array(self._action, np.int8), np.array(self._block, np.int32))
        likely = np.array([*map(likely_category, self._stacks), -1], np.int8)
        likely = likely[np.array(self._stack, np.int64)]
        told, size = np.array(self._category, np.int8), np.array(self._sizes, np.int64)
        refused = [at for at, _ in self._refusals]
        return categories_of(lives, size, phases, told, likely, len(self), self._first, refused)

    def _ended_phases(self) -> Iterator[Phase]:
        inside: list[int] = []  # ends of the open ones
        for name, begin, end in sorted(self._phases, key=itemgetter(1)):
            last = len(self) if end is None else end
            inside = [other for other in inside if other > begin]
            yield Phase(name, begin, last, len(inside))
            inside.append(last)


class SegmentLog:
    """Collects the segments of a log in the order in which they begin.

    A place is an address, with a number above it that keeps resources apart.
    """

    def __init__(self) -> None:
        self._rows: list[list[int]] = []  # place, bytes, event of the begin, event of the end
        self._places: list[int] = []  # of the present ones, sorted
        self._present: dict[int, int] = {}  # place -> row

    def begin(self, place: int, nbytes: int, event: int) -> None:
        """Record that memory lies at a place from an event on."""
        if not 0 < nbytes <= MAX_SIZE:
            return
        self.end(place, nbytes, event)  # its release was lost
        insort(self._places, place)
        self._present[place] = len(self._rows)
        self._rows.append([place, nbytes, event, -1])

    def end(self, place: int, nbytes: int, event: int) -> list[int]:
        """Record that no memory lies there any more; return the segments that ended in part."""
        ended = []
        at = bisect_left(self._places, place)
        if at and self._end_of(self._places[at - 1]) > place:
            at -= 1
        while at < len(self._places) and (begin := self._places[at]) < place + nbytes:
            stop = self._end_of(begin)
            ended.append(begin)
            self._rows[self._present.pop(begin)][3] = event
            del self._places[at]
            # The remainder on either side continues as a segment of its own.
            for first, last in ((begin, place), (place + nbytes, stop)):
                if first < last:
                    self._places.insert(at, first)
                    self._present[first] = len(self._rows)
                    self._rows.append([first, last - first, event, -1])
                    at += 1
        return ended

    def present(self) -> list[tuple[int, int]]:
        """Return place and bytes of the segments that are there now, by place."""
        return [(place, self._end_of(place) - place) for place in self._places]

    def columns(self) -> Segments | None:
        """Return all segments; None without any."""
        if not self._rows:
            return None
        places, nbytes, begin, end = zip(*self._rows, strict=True)
        address = np.array([place & _ADDRESS_BITS for place in places], np.uint64)
        return Segments(address, *(np.array(each, np.int64) for each in (nbytes, begin, end)))

    def _end_of(self, place: int) -> int:
        return place + self._rows[self._present[place]][1]


def _stream_name(handle: Hashable) -> str:
    """Name a stream by its handle; a per-thread stream is a pair of handle and thread."""
    if isinstance(handle, tuple):
        return f"thread {handle[1]}'s own"
    if not isinstance(handle, int):
        return str(handle)
    return {0: "default", 1: "legacy default", 2: "per-thread default"}.get(handle, f"{handle:#x}")


def require_device(device: int | None, count: int) -> None:
    """Raise TraceError unless `device` is None or the index of one of `count` memories."""
    if device is not None and not is_integer(device, 0, max(count - 1, 0)):
        raise TraceError(f"device is {device!r}, expected 0..{max(count - 1, 0)}")

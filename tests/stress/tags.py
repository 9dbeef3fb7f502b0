"""Tags that other threads put to sleep and wake, with blocks and rows that one thread uses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import gpumem

from .blocks import Blocks, Held, Shared

ROW = 256 << 10  # bytes
ROWS = 32
MOST_BLOCKS = 12


class Tag:
    """One thread's tag; whoever puts it to sleep, wakes or uses it holds the lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()


class Tags:
    """A thread's own tag, with blocks and a virtual tensor, and what it does to all tags.

    No work is queued on a tag that sleeps; blocks are dropped and rows released meanwhile.
    """

    def __init__(self, blocks: Blocks, shared: Shared, number: int, rng: random.Random) -> None:
        self._blocks, self._shared, self._rng = blocks, shared, rng
        self._held: list[Held] = []
        self._rows: list[Held] = []  # at most one: rows [0, committed) with one pattern
        self._tag = Tag(f"thread {number}")
        others = {each.memory.device for each in shared.beside} - {blocks.arena.memory.device}
        self._places = ["host", *sorted(others, key=str)]
        try:
            with blocks.arena.tag(self._tag.name):
                self._tensor: gpumem.VirtualTensor | None = blocks.arena.virtual(
                    (ROWS, ROW), "uint8", step=8, stream=shared.streams[0]
                )
        except gpumem.ConfigError:
            self._tensor = None  # this memory cannot sleep
            return
        shared.tags.append(self._tag)

    def actions(self) -> dict[Callable[[], None], int]:
        """Return what a thread may do, with weights."""
        if self._tensor is None:
            return {}
        return {self.use_tag: 60, self.use_rows: 30, self.sleep_a_tag: 6, self.wake_a_tag: 8}

    def finish(self) -> None:
        """Check what is awake, and release everything."""
        if self._tensor is None:
            return
        with self._tag.lock:
            self._shared.tags.remove(self._tag)
            if not self._sleeps():
                for held in self._held:
                    self._blocks.check(held)
                self._check_rows()
            self._held.clear()
            self._tensor.close()

    # ---- actions ---------------------------------------------------------------------------------

    def use_tag(self) -> None:
        """Allocate, check or free a block of the thread's tag."""
        with self._tag.lock:
            asleep = self._sleeps()
            if self._held and (len(self._held) == MOST_BLOCKS or self._rng.random() < 0.4):
                held = self._held.pop(self._rng.randrange(len(self._held)))
                if not asleep:
                    self._blocks.check(held)
                held.buffer.close(held.stream)
                return
            try:
                with self._blocks.arena.tag(self._tag.name):
                    stream = self._blocks.some_stream()
                    buffer = self._blocks.arena.allocate(self._blocks.some_size() // 4 + 1, stream)
            except gpumem.OutOfMemoryError:
                self._blocks.done["out of memory for a tag"] += 1
                del self._held[::2]
            except gpumem.errors.AsleepError:
                assert asleep
            else:
                assert not asleep
                tag = self._blocks.patterns.fill(buffer.ptr, buffer.nbytes, stream)
                self._held.append(Held(buffer, tag, stream))

    def use_rows(self) -> None:
        """Check the rows, then grow or shrink them and fill them anew."""
        assert self._tensor
        with self._tag.lock:
            rows = self._rng.randrange(ROWS)
            if self._sleeps():
                if self._rows and self._rng.random() < 0.3:
                    self._rows.clear()
                    self._tensor.release(0, ROWS)
                return
            self._check_rows()
            self._rows.clear()
            try:
                self._tensor.resize(rows)
            except gpumem.OutOfMemoryError:
                self._blocks.done["out of memory for a tag"] += 1
                return
            if rows:
                stream = self._rng.choice(self._shared.streams)
                self._tensor.record_stream(stream)
                for other in self._shared.streams:
                    self._blocks.order(other, stream)
                tag = self._blocks.patterns.fill(self._tensor.ptr, rows * ROW, stream)
                self._rows.append(Held(self._tensor, tag, stream))  # type: ignore[arg-type]

    def sleep_a_tag(self) -> None:
        """Put a thread's tag to sleep, mostly another one's, on the host or another device."""
        place = self._rng.choice(self._places)
        self._turn(lambda tag: self._blocks.arena.sleep(tag.name, place))
        self._blocks.done[f"sleeps to {place}"] += 1

    def wake_a_tag(self) -> None:
        """Wake a tag, if there is room for it."""
        try:
            self._turn(lambda tag: self._blocks.arena.wake(tag.name))
        except gpumem.OutOfMemoryError:
            self._blocks.done["out of memory for a wake"] += 1
            self._blocks.free()

    def _turn(self, call: Callable[[Tag], object]) -> None:
        tags = list(self._shared.tags)
        tag = self._rng.choice(tags) if tags else None
        if tag is not None and tag.lock.acquire(blocking=False):
            try:
                call(tag)
            finally:
                tag.lock.release()

    # ---- work ------------------------------------------------------------------------------------

    def _sleeps(self) -> bool:
        return self._tag.name in self._blocks.arena.asleep

    def _check_rows(self) -> None:
        assert self._tensor
        for held in self._rows:
            nbytes = self._tensor.committed * ROW
            self._blocks.check_at(self._tensor.ptr, nbytes, held.tag, held.stream, "rows of a tag")

"""The blocks of one thread: what they hold, and behind which stream's work."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import gpumem

from .patterns import LARGEST, Patterns

KIB, MIB = 1 << 10, 1 << 20
USUAL_SIZES = [300, 4 * KIB, 10_000, 64 * KIB, 200 * KIB, MIB, 2 * MIB + 512, 3 * MIB]


@dataclass
class Held:
    """A block, what it holds, and the stream behind whose work all use of it is ordered."""

    buffer: gpumem.Buffer
    tag: int
    stream: object
    read_elsewhere: bool = False  # another stream was told to the arena by record_stream


@dataclass
class Shared:
    """What the threads of one scenario have in common."""

    arena: gpumem.Arena
    beside: list  # arenas over pinned memory and other devices, which copies go through
    streams: list  # used by every thread
    peers: list  # of other devices that reach the arena's memory: their driver, an arena beside
    bytes_per_thread: int
    lie: bool  # tell the arena that a stream is drained when it is not
    without: tuple[str, ...] = ()  # names of actions that are left out
    stopped: bool = False
    inbox: deque = field(default_factory=deque)  # blocks on their way to another thread
    tags: list = field(default_factory=list)  # of the threads, which any of them puts to sleep


class Blocks:
    """One thread's blocks and streams."""

    def __init__(self, shared: Shared, patterns: Patterns, rng: random.Random) -> None:
        self.done: Counter = Counter()
        self.arena = shared.arena
        self.patterns = patterns
        device = shared.arena.memory.device
        self.own_streams = [gpumem.Stream(device) for _ in range(2)]
        self.streams = shared.streams
        self._most = shared.bytes_per_thread
        self._rng = rng
        self._held: list[Held] = []
        self._nbytes = 0

    # ---- in and out ------------------------------------------------------------------------------

    def made(self, nbytes: int, stream, *, persistent: bool = False) -> gpumem.Buffer | None:
        """Allocate a block; None: memory is out, and half of the thread's blocks are freed."""
        while self._held and self._nbytes > self._most:
            self.free()
        try:
            if persistent:  # ordered with no stream: it may be used on any
                return self.arena.allocate_persistent(nbytes)
            return self.arena.allocate(nbytes, stream)
        except gpumem.OutOfMemoryError:
            self.done["out of memory"] += 1
            for _ in range(len(self._held) // 2):
                self.free()
            return None

    def fill(self, buffer: gpumem.Buffer, stream) -> None:
        """Write a pattern and keep the block."""
        self.add(Held(buffer, self.patterns.fill(buffer.ptr, buffer.nbytes, stream), stream))

    def add(self, held: Held) -> None:
        """Keep a block."""
        self._held.append(held)
        self._nbytes += held.buffer.nbytes

    def some(self) -> Held | None:
        """Choose a block, which stays."""
        return self._rng.choice(self._held) if self._held else None

    def drawn(self) -> Held | None:
        """Take a block out."""
        if not self._held:
            return None
        held = self._held.pop(self._rng.randrange(len(self._held)))
        self._nbytes -= held.buffer.nbytes
        return held

    def free(self) -> bool:
        """Free a block, checked or not, in one of the ways there are; False: there is none."""
        held = self.drawn()
        if held is None:
            return False
        if self._rng.random() < 0.5:
            self.check(held)
        ways = [self._close_on_last_stream, self._close_on_any_stream]
        if held.stream == held.buffer.stream:
            ways += [self._close, self._drop]
        self._rng.choice(ways)(held)
        return True

    def _close(self, held: Held) -> None:
        held.buffer.close()

    def _drop(self, held: Held) -> None:
        del held.buffer

    def _close_on_last_stream(self, held: Held) -> None:
        held.buffer.close(held.stream)

    def _close_on_any_stream(self, held: Held) -> None:
        stream = self.some_stream()
        self.order(held.stream, stream)
        held.buffer.close(stream)

    # ---- order -----------------------------------------------------------------------------------

    def order(self, first, then) -> None:
        """Let a stream's later work wait for what another has queued."""
        if then != first:
            then.wait(first.record())

    def move_to(self, held: Held, stream) -> None:
        """All use of the block from here on is behind this stream's work."""
        self.order(held.stream, stream)
        held.stream = stream

    def read_on(self, held: Held, stream) -> None:
        """Let a stream read a block; writes come after it, or there are none any more."""
        if held.read_elsewhere:
            self.order(held.stream, stream)
            held.buffer.record_stream(stream)
        else:
            self.move_to(held, stream)

    def check(self, held: Held, stream=None) -> None:
        """Queue a check on the block's stream, or on one that was ordered behind it."""
        on = held.stream if stream is None else stream
        self.check_at(held.buffer.ptr, held.buffer.nbytes, held.tag, on, f"{held.buffer!r}")

    def check_at(self, address: int, nbytes: int, tag: int, stream, what: str) -> None:
        """Queue a check of memory that is no block of the thread any more."""
        self.patterns.check(address, nbytes, tag, stream, what)

    # ---- choices ---------------------------------------------------------------------------------

    def some_stream(self):
        """Choose a stream, mostly one of the thread's."""
        return self._rng.choice(self.own_streams * 2 + self.streams)

    def some_size(self) -> int:
        """Choose a number of bytes."""
        kind = self._rng.random()
        if kind < 0.5:
            return self._rng.choice(USUAL_SIZES)
        if kind < 0.98:
            return int(2 ** self._rng.uniform(0, 22))
        return self._rng.randrange(4 * MIB, LARGEST // 2)

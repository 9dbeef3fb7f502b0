"""What one thread of a scenario does: allocate, fill, use, check and free blocks at random."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import gpumem

from .patterns import LARGEST, Patterns

KIB, MIB = 1 << 10, 1 << 20
LONGEST_DRAG = 500  # microseconds
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
    streams: list  # used by every thread
    bytes_per_thread: int
    lie: bool  # tell the arena that a stream is drained when it is not
    stopped: bool = False
    inbox: deque = field(default_factory=deque)  # blocks on their way to another thread


class Worker:
    """One thread's blocks, streams and random decisions."""

    def __init__(self, shared: Shared, patterns: Patterns, seed: int) -> None:
        self.done: Counter = Counter()
        self._shared = shared
        self._arena = shared.arena
        self._patterns = patterns
        self._rng = random.Random(seed)
        self._device = shared.arena.memory.device
        self._own = [gpumem.Stream(self._device) for _ in range(2)]
        self._held: list[Held] = []
        self._held_bytes = 0
        actions = {
            self.allocate: 400,
            self.free: 320,
            self.use_on_another_stream: 80,
            self.check: 60,
            self.drag: 60,
            self.hand_to_another_thread: 10,
            self.take_from_another_thread: 10,
            self.allocate_persistent: 3,
            self.shrink: 3,
            self.reset_own_stream: 100 if shared.lie else 3,
            self.replace_own_stream: 3,
            self.look: 3,
        }
        self._actions, self._weights = list(actions), list(actions.values())

    def step(self) -> None:
        """Do one thing."""
        action = self._rng.choices(self._actions, self._weights)[0]
        action()
        self.done[action.__name__] += 1

    def finish(self) -> None:
        """Free everything, and wait for every check."""
        while self._held:
            self.free()
        self._patterns.settle(everything=True)
        for stream in self._own:
            stream.synchronize()

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self) -> None:
        while self._held and self._held_bytes > self._shared.bytes_per_thread:
            self.free()
        stream = self._some_stream()
        self._take(self._some_size(), stream, self._arena.allocate, stream)

    def allocate_persistent(self) -> None:
        # Ordered with no stream: it may be used on any.
        self._take(self._some_size() // 8 + 1, self._some_stream(), self._arena.allocate_persistent)

    def _take(self, nbytes: int, stream, allocate, *arguments) -> None:
        try:
            buffer = allocate(nbytes, *arguments)
        except gpumem.OutOfMemoryError:
            self.done["out of memory"] += 1
            for _ in range(len(self._held) // 2):
                self.free()
            return
        tag = self._patterns.fill(buffer.ptr, nbytes, stream)
        self._held.append(Held(buffer, tag, stream))
        self._held_bytes += nbytes

    def free(self) -> None:
        held = self._drawn()
        if held is None:
            return
        if self._rng.random() < 0.5:
            self._check(held)
        ways = [self._close_on_last_stream, self._close_on_any_stream]
        if held.stream == held.buffer.stream:
            ways += [self._close, self._drop]
        self._rng.choice(ways)(held)

    def _close(self, held: Held) -> None:
        held.buffer.close()

    def _drop(self, held: Held) -> None:
        del held.buffer

    def _close_on_last_stream(self, held: Held) -> None:
        held.buffer.close(held.stream)

    def _close_on_any_stream(self, held: Held) -> None:
        stream = self._some_stream()
        self._order(held, stream)
        held.buffer.close(stream)

    # ---- work ------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._held:
            self._check(self._rng.choice(self._held))

    def use_on_another_stream(self) -> None:
        """Read, and perhaps write, behind the work of the stream that used the block last."""
        if not self._held:
            return
        held, stream = self._rng.choice(self._held), self._some_stream()
        if self._rng.random() < 0.5:
            self._read_beside(held, stream)
            return
        if held.read_elsewhere:
            return
        self._order(held, stream)
        held.stream = stream
        self._check(held)
        if self._rng.random() < 0.5:
            held.tag = self._patterns.fill(held.buffer.ptr, held.buffer.nbytes, stream)

    def _read_beside(self, held: Held, stream) -> None:
        # From here on nobody writes, and the arena must wait for this stream by itself.
        stream.wait(held.stream.record())
        if self._rng.random() < 0.5:
            self._patterns.drag(self._rng.randrange(LONGEST_DRAG), stream)
        self._check(held, stream)
        held.buffer.record_stream(stream)
        held.read_elsewhere = True
        self.done["record_stream"] += 1

    def drag(self) -> None:
        self._patterns.drag(self._rng.randrange(LONGEST_DRAG), self._some_stream())

    def _check(self, held: Held, stream=None) -> None:
        what = f"{held.buffer!r}"
        on = held.stream if stream is None else stream
        self._patterns.check(held.buffer.ptr, held.buffer.nbytes, held.tag, on, what)

    def _order(self, held: Held, stream) -> None:
        if stream != held.stream:
            stream.wait(held.stream.record())

    # ---- other threads, streams' ends, the arena as a whole --------------------------------------

    def hand_to_another_thread(self) -> None:
        # On a stream of everybody's: an own stream is reset by its thread, at any time.
        held = self._drawn()
        if held is None:
            return
        if held.read_elsewhere or held.buffer.stream in self._own:
            self._keep(held)
            return
        stream = self._rng.choice(self._shared.streams)
        self._order(held, stream)
        held.stream = stream
        self._shared.inbox.append(held)

    def take_from_another_thread(self) -> None:
        if self._shared.inbox:
            self._keep(self._shared.inbox.popleft())

    def shrink(self) -> None:
        self._arena.shrink()

    def reset_own_stream(self) -> None:
        stream = self._rng.choice(self._own)
        if not self._shared.lie:
            stream.synchronize()
        self._arena.reset_stream(stream)

    def replace_own_stream(self) -> None:
        self._own[self._rng.randrange(len(self._own))] = gpumem.Stream(self._device)

    def look(self) -> None:
        self._arena.check_invariants()
        stats = self._arena.stats()
        assert stats.reserved <= (stats.limit or stats.reserved), stats
        self._arena.blocks()

    # ---- choices ---------------------------------------------------------------------------------

    def _some_stream(self):
        return self._rng.choice(self._own * 2 + self._shared.streams)

    def _some_size(self) -> int:
        kind = self._rng.random()
        if kind < 0.5:
            return self._rng.choice(USUAL_SIZES)
        if kind < 0.98:
            return int(2 ** self._rng.uniform(0, 22))
        return self._rng.randrange(4 * MIB, LARGEST // 2)

    def _drawn(self) -> Held | None:
        if not self._held:
            return None
        held = self._held.pop(self._rng.randrange(len(self._held)))
        self._held_bytes -= held.buffer.nbytes
        return held

    def _keep(self, held: Held) -> None:
        self._held.append(held)
        self._held_bytes += held.buffer.nbytes

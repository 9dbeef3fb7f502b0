"""What one thread of a scenario does: allocate, fill, use, check and free blocks at random."""

from __future__ import annotations

import random

import gpumem

from .blocks import Blocks, Shared
from .crossings import Crossings
from .patterns import Patterns
from .peers import Peers
from .rows import Rows
from .tags import Tags

LONGEST_DRAG = 500  # microseconds


class Worker:
    """One thread's random decisions."""

    def __init__(self, shared: Shared, patterns: Patterns, number: int, seed: int) -> None:
        self._shared = shared
        self._arena = shared.arena
        self._rng = random.Random(seed)
        self.blocks = Blocks(shared, patterns, self._rng)
        self.crossings = Crossings(self.blocks, shared.beside, self._rng)
        self.peers = Peers(self.blocks, shared.peers, number, self._rng)
        self.rows = Rows(self.blocks, self._rng)
        self.tags = Tags(self.blocks, shared, number, self._rng)
        self.done = self.blocks.done
        actions = {
            self.allocate: 400,
            self.blocks.free: 320,
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
            **self.crossings.actions(),
            **self.peers.actions(),
            **self.rows.actions(),
            **self.tags.actions(),
        }
        for name in shared.without:
            # Some memories lack some actions.
            actions = {each: weight for each, weight in actions.items() if each.__name__ != name}
        self._actions, self._weights = list(actions), list(actions.values())

    def step(self) -> None:
        """Do one thing."""
        action = self._rng.choices(self._actions, self._weights)[0]
        action()
        self.done[action.__name__] += 1

    def finish(self) -> None:
        """Free everything, and wait for every check."""
        while self.blocks.free():
            pass
        self.rows.finish()
        self.tags.finish()
        self.blocks.patterns.settle(everything=True)
        self.peers.finish()
        # Streams of sessions signal the timeline, too.
        self._arena.memory.device.synchronize()
        self.crossings.close()

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self) -> None:
        self._allocate(self.blocks.some_size(), persistent=False)

    def allocate_persistent(self) -> None:
        self._allocate(self.blocks.some_size() // 8 + 1, persistent=True)

    def _allocate(self, nbytes: int, *, persistent: bool) -> None:
        stream = self.blocks.some_stream()
        buffer = self.blocks.made(nbytes, stream, persistent=persistent)
        if buffer is not None:
            self.blocks.fill(buffer, stream)

    # ---- work ------------------------------------------------------------------------------------

    def check(self) -> None:
        held = self.blocks.some()
        if held is not None:
            self.blocks.check(held)

    def use_on_another_stream(self) -> None:
        """Read, and perhaps write, behind the work of the stream that used the block last."""
        held, stream = self.blocks.some(), self.blocks.some_stream()
        if held is None:
            return
        if self._rng.random() < 0.5:
            self._read_beside(held, stream)
        elif not held.read_elsewhere:
            self.blocks.move_to(held, stream)
            self.blocks.check(held)
            if self._rng.random() < 0.5:
                held.tag = self.blocks.patterns.fill(held.buffer.ptr, held.buffer.nbytes, stream)

    def _read_beside(self, held, stream) -> None:
        # From here on nobody writes, and the arena must wait for this stream by itself.
        stream.wait(held.stream.record())
        if self._rng.random() < 0.5:
            self.blocks.patterns.drag(self._rng.randrange(LONGEST_DRAG), stream)
        self.blocks.check(held, stream)
        held.buffer.record_stream(stream)
        held.read_elsewhere = True
        self.done["record_stream"] += 1

    def drag(self) -> None:
        self.blocks.patterns.drag(self._rng.randrange(LONGEST_DRAG), self.blocks.some_stream())

    # ---- other threads, streams' ends, the arena as a whole --------------------------------------

    def hand_to_another_thread(self) -> None:
        # On a stream of everybody's: an own stream is reset by its thread, at any time.
        held = self.blocks.drawn()
        if held is None:
            return
        if held.read_elsewhere or held.buffer.stream not in self._shared.streams:
            self.blocks.add(held)
            return
        self.blocks.move_to(held, self._rng.choice(self._shared.streams))
        self._shared.inbox.append(held)

    def take_from_another_thread(self) -> None:
        if self._shared.inbox:
            self.blocks.add(self._shared.inbox.popleft())

    def shrink(self) -> None:
        self._arena.shrink()

    def reset_own_stream(self) -> None:
        stream = self._rng.choice(self.blocks.own_streams)
        if not self._shared.lie:
            stream.synchronize()
        self._arena.reset_stream(stream)

    def replace_own_stream(self) -> None:
        own = self.blocks.own_streams
        own[self._rng.randrange(len(own))] = gpumem.Stream(self._arena.memory.device)

    def look(self) -> None:
        self._arena.check_invariants()
        stats = self._arena.stats()
        assert not stats.limit or stats.reserved <= stats.limit, stats
        budget = self._arena.budget
        assert budget is None or budget.used <= budget.limit, budget
        self._arena.blocks()

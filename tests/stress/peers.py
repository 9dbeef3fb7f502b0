"""Other devices that reach an arena's blocks by themselves: they fill and read them."""

from __future__ import annotations

import random
from collections.abc import Callable

import gpumem

from .blocks import Blocks, Held
from .patterns import Patterns

WRITERS = 64  # threads of a scenario are below it: their peers write as others


class Peers:
    """One thread's streams on other devices.

    Parameters
    ----------
    blocks : Blocks
        The thread's blocks.
    peers : list of pairs of HostDriver and Arena
        The other devices' functions, and memory there.
    number : int
        The thread's, by which its peers' fills are told.
    rng : random.Random
        Where decisions come from.
    """

    def __init__(self, blocks: Blocks, peers: list, number: int, rng: random.Random) -> None:
        self._blocks = blocks
        self._rng = rng
        self.patterns = [
            Patterns(driver, WRITERS + (number * len(peers) + index) % WRITERS)
            for index, (driver, _) in enumerate(peers)
        ]
        self._arenas = [arena for _, arena in peers]
        self._streams = [gpumem.Stream(arena.memory.device) for arena in self._arenas]

    def actions(self) -> dict[Callable[[], None], int]:
        """Return what a thread may do, with weights."""
        if not self.patterns:
            return {}
        return {self.use_by_a_peer: 80, self.copy_by_a_peer: 20}

    def finish(self) -> None:
        """Wait for every check."""
        for patterns in self.patterns:
            patterns.settle(everything=True)

    def use_by_a_peer(self) -> None:
        """Let another device fill a block or read it, between the owner's uses of it."""
        held, peer = self._blocks.some(), self._rng.randrange(len(self.patterns))
        if held is None or held.read_elsewhere:
            return
        patterns, stream = self.patterns[peer], self._streams[peer]
        self._blocks.arena.enable_peer(stream.device)
        self._blocks.order(held.stream, stream)
        patterns.check(held.buffer.ptr, held.buffer.nbytes, held.tag, stream, f"{held.buffer!r}")
        if self._rng.random() < 0.5:
            held.tag = patterns.fill(held.buffer.ptr, held.buffer.nbytes, stream)
        if self._rng.random() < 0.3:
            patterns.drag(self._rng.randrange(300), stream)
        self._blocks.order(stream, held.stream)

    def copy_by_a_peer(self) -> None:
        """Copy a block into a new one by another device, by way of its memory."""
        held, peer = self._blocks.drawn(), self._rng.randrange(len(self.patterns))
        if held is None:
            return
        stream, owner = self._streams[peer], held.stream
        try:
            between = self._arenas[peer].allocate(held.buffer.nbytes, stream)
        except gpumem.OutOfMemoryError:
            self._blocks.add(held)
            return
        made = None if held.read_elsewhere else self._blocks.made(held.buffer.nbytes, owner)
        if made is not None:
            self._blocks.order(owner, stream)
            gpumem.copy(between, held.buffer, stream)
            gpumem.copy(made, between, stream)
            self._blocks.order(stream, owner)
            self._blocks.add(Held(made, held.tag, owner))
        between.close()
        self._blocks.add(held)

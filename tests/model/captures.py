"""Rules of graphs that the user captures: their memory is the graph's, launched or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from gpumem._buffer.stream import Graph
from gpumem.errors import ClosedError, OutOfMemoryError

from .books import Arena
from .diary import note, rule
from .memory import MemoryRules
from .work import Op, Queue, require_bytes
from .world import LEGACY, picks

MOST_GRAPHS = 2
sizes_in_graphs = st.sampled_from([1000, 64 << 10, 300_000])


@dataclass(eq=False)
class Captured:
    """A graph that fills blocks of its pool."""

    name: str
    arena: Arena
    queue: Queue
    real: Any
    pool: Any = None
    held: list[tuple[Any, int]] = field(default_factory=list)  # Buffers, and the byte of each
    ranges: list[tuple[int, int]] = field(default_factory=list)  # those that were freed, too
    launches: list[Op] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name

    def require_bytes(self) -> None:
        if self.launches and self.launches[-1].sure and not self.arena.suspended:
            for buffer, byte in self.held:
                require_bytes(buffer.ptr, buffer.nbytes, byte, f"a block of {self}")


class CaptureRules(MemoryRules):
    """Graphs."""

    @precondition(lambda self: len(self.graphs) < MOST_GRAPHS and self.arenas_to_capture())
    @rule(
        arena=picks,
        stream=picks,
        blocks=st.lists(st.tuples(sizes_in_graphs, st.booleans()), min_size=1, max_size=4),
        beside=st.none() | st.tuples(sizes_in_graphs, picks),
    )
    def capture_a_graph(self, arena, stream, blocks, beside):
        arena = self.some(self.arenas_to_capture(), arena)
        queues = [one for one in self.queues_of(arena.device) if one.stream.ptr != LEGACY]
        queue = self.some(queues, stream)
        self.before_allocation(arena, sum(nbytes for nbytes, _ in blocks))
        one = Captured(f"graph{next(self.numbers)}", arena, queue, Graph(queue.stream))
        note(f"    # {one} of {arena} on {queue}")
        try:
            self.capture(one, blocks, beside)
        except OutOfMemoryError as error:
            refusal = error.with_traceback(None)  # which holds the capture's memory
        else:
            refusal = None
        one.end = lambda: self.drop_graph(one)
        self.graphs.append(one)
        if refusal is not None:
            # First, as it was refused: the graph holds what it had been given until then.
            self.require_truth(arena, max(nbytes for nbytes, _ in blocks), refusal)
            self.drop_graph(one)

    def arenas_to_capture(self) -> list[Arena]:
        return [one for one in self.open_arenas() if one.owner is None and not one.passes]

    def capture(self, one: Captured, blocks: Any, beside: Any) -> None:
        ranges = self.captured[one] = one.ranges
        with one.arena.real.capture(one.queue.stream) as one.pool:
            one.real.begin()
            try:
                for nbytes, is_held in blocks:
                    buffer = one.arena.real.allocate(nbytes, one.queue.stream)
                    self.require_apart(one, buffer)
                    byte = next(self.bytes)
                    self.kernels.fill(one.queue.stream, buffer.ptr, nbytes, byte)
                    ranges.append((buffer.ptr, buffer.ptr + nbytes))
                    if is_held:
                        one.held.append((buffer, byte))
                    else:
                        buffer.close()
                if beside is not None:  # of the arena, as its stream captures nothing
                    self.allocate_beside(one, *beside)
            except BaseException:
                one.real.abandon()
                raise
            one.real.end()
            one.pool.retain_with(one.real.handle)
        one.real.instantiate()
        in_use = sum(buffer.allocated_nbytes for buffer, _ in one.held)
        assert one.pool.stats().in_use == in_use, f"{one}: {one.pool.stats()}, expected {in_use}"

    def allocate_beside(self, one: Captured, nbytes: int, stream: int) -> None:
        arena = one.arena
        others = [each for each in self.queues_of(arena.device) if each is not one.queue]
        other = self.some(others, stream)
        if other.stream.ptr != LEGACY and arena.is_paged:
            self.obtain(arena, nbytes, other, lambda: arena.real.allocate(nbytes, other.stream))

    def require_apart(self, one: Captured, buffer: Any) -> None:
        """Nobody else has a graph's memory, and no other graph has it."""
        start, end = buffer.ptr, buffer.ptr + buffer.nbytes
        for block in self.blocks:
            assert end <= block.start or block.end <= start, f"{one} has memory of {block}"
        for owner, ranges in self.captured.items():
            for low, high in ranges if owner is not one else ():
                assert end <= low or high <= start, f"{one} has memory of {owner}"
        for held, _ in one.held:
            assert end <= held.ptr or held.ptr + held.nbytes <= start, f"{one} has it twice"

    @precondition(lambda self: self.graphs_awake())
    @rule(graph=picks)
    def launch_a_graph(self, graph):
        one = self.some(self.graphs_awake(), graph)
        note(f"    # {one} on {one.queue}")
        one.real.launch()
        one.launches.append(one.queue.add())

    @precondition(lambda self: self.graphs)
    @rule(graph=picks)
    def look_at_a_graphs_blocks(self, graph):
        one = self.some(self.graphs, graph)
        one.require_bytes()
        one.pool.check_invariants()

    @precondition(lambda self: self.graphs)
    @rule(graph=picks)
    def end_a_graph(self, graph):
        """Perhaps with launches unfinished."""
        self.drop_graph(self.some(self.graphs, graph))

    @precondition(lambda self: self.graphs_awake() and self.calm)
    @rule(graph=picks)
    def close_a_graphs_pool(self, graph):
        """It gives its memory back at once, and serves nobody any more."""
        one = self.some(self.graphs_awake(), graph)
        one.require_bytes()
        one.real = None  # the graph: nothing may be launched into memory that is gone
        one.held.clear()
        one.pool.close()
        with self.refused(ClosedError, arena=one.arena):
            one.arena.real.capture(one.queue.stream, pool=one.pool).__enter__()
        self.drop_graph(one)

    def graphs_awake(self) -> list[Captured]:
        """Graph pools sleep with their arena."""
        return [one for one in self.graphs if not one.arena.suspended]

    def drop_graph(self, one: Captured) -> None:
        one.require_bytes()
        one.held.clear()
        one.real = one.pool = None
        self.graphs.remove(one)
        self.graph_is_gone(one, one.arena, one.queue)

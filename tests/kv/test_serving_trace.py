"""A serving trace with a BlockPool below it: what it holds, against what its blocks need."""

from __future__ import annotations

import numpy as np
import pytest
from kv import serving_trace as trace

from gpumem.kv import BlockPool

BLOCK = trace.BLOCK_TOKENS * trace.TOKEN_BYTES
MOST_BLOCKS = 4096
LIMIT = 64  # blocks moved before a step at the most
WASTE = 0.02  # of the floor, at which blocks are moved
MARK = 8  # bytes at the beginning of a block that say whose it is


class Engine:
    """Runs the requests of the trace: tables of blocks, prefixes, marks instead of attention."""

    def __init__(self, arena, compacts: bool, rows: int = 1, near: bool = True) -> None:
        # Of the keys and values of all layers, a row of a tensor has so many.
        shape = (MOST_BLOCKS, rows, BLOCK)
        count = 2 * trace.LAYERS // rows
        tensors = [arena.virtual(shape, "uint8", step=1) for _ in range(count)]
        self.pool = BlockPool(tensors)
        self.near = near
        self.compacts = compacts
        self.running: list[list] = []  # request, tokens, table of blocks
        self.prefixes: dict[int, list[int]] = {}
        self.held: list[int] = []
        self.floor: list[int] = []
        self.moves = 0

    def run(self, requests) -> None:
        waiting = list(reversed(requests))
        step = 0
        while waiting or self.running:
            while waiting and waiting[-1].arrival <= step:
                self.admit(waiting.pop())
            for sequence in self.running:
                sequence[1] += 1
            for sequence in self.running:
                if sequence[1] > len(sequence[2]) * trace.BLOCK_TOKENS:
                    sequence[2] += self.take(1, sequence[2] if self.near else ())
            for sequence in self.running:
                if sequence[1] >= sequence[0].prompt + sequence[0].output:
                    self.finish(sequence)
            self.running = [s for s in self.running if s[2]]
            wasted = self.pool.held_nbytes - self.pool.floor_nbytes
            if self.compacts and wasted > WASTE * self.pool.floor_nbytes:
                self.compact(LIMIT)
            self.held.append(self.pool.held_nbytes)
            self.floor.append(self.pool.floor_nbytes)
            step += 1

    def admit(self, request) -> None:
        table: list[int] = []
        if request.prefix:
            whole = trace.PREFIXES[request.prefix] // trace.BLOCK_TOKENS
            if request.prefix not in self.prefixes:
                self.prefixes[request.prefix] = self.take(whole)
            table = list(self.prefixes[request.prefix])
            self.pool.share(table)
        blocks = -(-request.prompt // trace.BLOCK_TOKENS)
        self.running.append([request, request.prompt, table + self.take(blocks - len(table))])

    def take(self, count: int, near=()) -> list[int]:
        blocks = self.pool.allocate(count, near=near).tolist()
        for block in blocks:
            for number, tensor in enumerate(self.pool.tensors):
                mark(tensor, block)[:] = (block + number) % 251
        self.origin = getattr(self, "origin", {}) | {block: block for block in blocks}
        return blocks

    def finish(self, sequence) -> None:
        for block in sequence[2]:
            for number, tensor in enumerate(self.pool.tensors):
                assert (mark(tensor, block) == (self.origin[block] + number) % 251).all()
        self.pool.free(sequence[2])
        sequence[2] = []

    def compact(self, limit=None) -> None:
        moves = self.pool.compact(limit)
        for origin, target in moves.tolist():
            for tensor in self.pool.tensors:
                mark(tensor, target)[:] = mark(tensor, origin)
            self.origin[target] = self.origin[origin]
        self.pool.moved(moves)
        there = dict(moves.tolist())
        for sequence in self.running:
            sequence[2] = [there.get(block, block) for block in sequence[2]]
        for prefix, table in self.prefixes.items():
            self.prefixes[prefix] = [there.get(block, block) for block in table]
        self.moves += len(moves)


def mark(tensor, block: int):
    return tensor.full[block, 0, :MARK].numpy()


def ratio(engine: Engine) -> float:
    return float(np.sum(engine.held) / np.sum(engine.floor))


def test_trace_is_what_its_generator_writes():
    assert trace.FILE.read_text() == trace.text()
    assert trace.load() == trace.generate()


def test_bytes_held_are_near_the_floor_while_the_trace_is_served(make_arena):
    arena = make_arena()
    engine = Engine(arena, compacts=True)
    engine.run(trace.load())
    print(f"held / floor {ratio(engine):.4f}, {engine.moves} blocks moved")
    assert ratio(engine) <= 1.02
    held, floor = np.array(engine.held), np.array(engine.floor)
    assert held.max() <= 1.02 * floor.max()
    engine.compact()
    assert engine.pool.held_nbytes <= 1.02 * engine.pool.floor_nbytes
    for table in engine.prefixes.values():
        engine.pool.free(table)
    assert engine.pool.held_nbytes == arena.stats().virtual == 0


@pytest.mark.parametrize(
    ("rows", "near", "most"), [(8, True, 1.05), (8, False, 1.12), (1, True, 1.28)]
)
def test_placement_alone_keeps_the_pages_full(make_arena, rows, near, most):
    engine = Engine(make_arena(), compacts=False, rows=rows, near=near)
    engine.run(trace.load())
    print(f"held / floor {ratio(engine):.4f}")
    assert ratio(engine) <= most


@pytest.mark.parametrize("until", [600, 1500, 2300])
def test_compaction_comes_within_two_per_cent_of_the_floor(make_arena, until):
    engine = Engine(make_arena(), compacts=False)
    engine.run([each for each in trace.load() if each.arrival <= until])
    print(f"held / floor without moves {ratio(engine):.4f}")
    engine = Engine(make_arena(), compacts=False)
    requests = [each._replace(output=10_000) for each in trace.load() if each.arrival <= until]
    for request in requests[-60:]:
        engine.admit(request)
    for sequence in engine.running[::3]:
        engine.finish(sequence)
    engine.running = [sequence for sequence in engine.running if sequence[2]]
    engine.compact()
    assert engine.pool.held_nbytes <= 1.02 * engine.pool.floor_nbytes

"""Calls for host memory that fail, one by one: each is a MemoryError, nothing else changes."""

from pathlib import Path

import pytest
from helpers.child import python
from helpers.marks import NEEDS_OWN_MALLOC

ROOT = Path(__file__).parents[2]

pytestmark = NEEDS_OWN_MALLOC

EACH_CALL_FAILS = """
from tests.faults.kinds import HeapCalls, start_with_heap_calls

start_with_heap_calls()

import gpumem
from gpumem._testing import host_device

KIB, MIB = 1 << 10, 1 << 20
ENOMEM = 12
heap = HeapCalls()


class Steps:
    # A step that fails for want of host memory is taken again, with memory.

    def __init__(self):
        self.arena = None
        self.refused = 0

    def __call__(self, function, *arguments, **more):
        before = self.state()
        try:
            return function(*arguments, **more)
        except MemoryError:
            assert heap.failed() is not None
        self.refused += 1
        assert self.state() == before, (function, before, self.state())
        return function(*arguments, **more)

    def state(self):
        if self.arena is None:
            return None
        self.arena.check_invariants()
        stats = self.arena.stats()
        return stats.in_use, stats.num_allocs


def held_memory():
    reserved = host_device.call_count("cuMemAddressReserve")
    freed = host_device.call_count("cuMemAddressFree")
    return gpumem.Device("host").free_bytes, reserved - freed


def fail_each(program):
    # Returns how many calls there are, and how many steps were refused.
    program(Steps())
    heap.watch()
    refused = due = 0
    while True:
        due += 1
        steps = Steps()
        held = held_memory()
        heap.arm(due, ENOMEM)
        program(steps)
        reached = heap.failed() is not None
        heap.disarm()
        assert held_memory() == held, due
        if not reached:
            return due - 1, refused
        refused += steps.refused


def grow_and_share(step):
    streams = [gpumem.Stream("host") for _ in range(10)]
    step.arena = arena = step(
        gpumem.Arena, "host", {"backing": "regions", "extend_strategy": "same_as_requested",
                               "stream_reuse": "wait"}
    )
    blocks = [step(arena.allocate, MIB, stream) for stream in streams]
    for block in blocks:
        step(block.record_stream, streams[0])
        block.close()
    small = [step(arena.allocate, 300, stream) for stream in streams]
    small.clear()
    kept = step(arena.allocate_persistent, MIB)
    again = step(arena.allocate, MIB + 256, streams[3])
    again.close()
    kept.close()
    step(arena.shrink)
    assert arena.stats().in_use == 0
    arena.close()


def move_pages(step):
    streams = [gpumem.Stream("host") for _ in range(3)]
    step.arena = arena = step(
        gpumem.Arena, "host", {"backing": "virtual", "page_move_threshold": 0,
                               "stream_reuse": "wait"}
    )
    blocks = [step(arena.allocate, nbytes * MIB, streams[0]) for nbytes in (4, 2, 6, 2)]
    blocks[0].close()
    blocks[2].close()
    large = step(arena.allocate, 9 * MIB, streams[1])
    kept = step(arena.allocate_persistent, MIB)
    blocks[1].close()
    large.close()
    step(arena.shrink)
    wide = step(arena.allocate, 300 * MIB, streams[2])
    small = step(arena.allocate, 5 * KIB, streams[2])
    for block in (blocks[3], kept, wide, small):
        block.close()
    step(arena.shrink)
    assert arena.stats().in_use == 0
    arena.close()


def share_a_budget(step):
    budget = step(gpumem.Budget, 64 * MIB, name="all")
    part = step(gpumem.Budget, 32 * MIB, parent=budget, name="part")
    step.arena = arena = step(gpumem.Arena, "host", {"backing": "regions"}, budget=part)
    block = step(arena.allocate, MIB)
    assert step(budget.holders) == (("part", MIB),)
    block.close()
    arena.close()
    assert budget.used == 0
"""


@pytest.mark.parametrize("program", ["grow_and_share", "move_pages", "share_a_budget"])
def test_step_that_lacks_host_memory_is_refused_and_works_again(program):
    done = python("-c", f"{EACH_CALL_FAILS}\nprint(*fail_each({program}))", cwd=ROOT)
    calls, refused = map(int, done.stdout.split())
    assert calls >= refused >= 3

"""Every driver call of a scenario fails once, each in its own run: the arena lives through it."""

from __future__ import annotations

import pytest
from helpers.quiesce import held_by_kind, quiesce
from helpers.threads import in_a_thread

import gpumem

MIB = 1 << 20
EDGE = 256  # bytes at either end of a block
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
CONFIGS = {
    "virtual": {"backing": "virtual", "page_move_threshold": 0, "stream_reuse": "completed"},
    "virtual, wait": {"backing": "virtual", "page_move_threshold": 0, "stream_reuse": "wait"},
    "regions": {"backing": "regions", "split_rule": "tight"},
}


class Scenario:
    """Allocates, moves, shrinks, suspends, resumes and closes; goes on after an error."""

    def __init__(self, config, streams) -> None:
        self.arena = gpumem.Arena("host", config)
        self.streams = streams
        self.live = []
        self.errors = []

    def attempt(self, call, *arguments):
        """Call; an error must be a typed one, and leave the books sound and the bytes in place."""
        try:
            return call(*arguments)
        except (gpumem.OutOfMemoryError, gpumem.errors.DriverError) as error:
            self.errors.append(str(error))  # the error itself would keep the arena
        finally:
            self.check()

    def check(self):
        self.arena.check_invariants()
        if not getattr(self.arena, "asleep", ()):
            for buffer, value in self.live:
                view = memoryview(buffer)
                assert bytes(view[:EDGE]) == bytes(view[-EDGE:]) == bytes([value]) * EDGE

    def take(self, size, stream=None):
        buffer = self.attempt(self.arena.allocate, size, stream)
        self.keep(buffer)

    def keep(self, buffer):
        if buffer is not None:
            value = len(self.live) % 250 + 1
            view = memoryview(buffer)
            view[:EDGE] = view[-EDGE:] = bytes([value]) * EDGE
            self.live.append((buffer, value))

    def drop(self, *numbers):
        for number in sorted(numbers, reverse=True):
            if number < len(self.live):
                self.live.pop(number)[0].close()

    def run(self):
        first, second = self.streams
        for size in (4 * MIB, 3000, 6 * MIB, 300, 2 * MIB):
            self.take(size, first)
        self.keep(self.attempt(self.arena.allocate_persistent, MIB))
        self.drop(0, 2)
        self.take(9 * MIB, first)  # pages move
        self.drop(2)
        self.take(3 * MIB, second)
        self.drop(0, 3)
        self.attempt(self.arena.shrink)
        if self.arena.backing == "virtual":
            self.attempt(self.arena.sleep)
            self.drop(1)
            self.attempt(self.arena.wake)
            if self.arena.asleep:
                self.arena.wake()
            self.check()
        self.take(2 * MIB, first)

    def go(self):
        self.run()
        self.end()

    def end(self):
        self.drop(*range(len(self.live)))
        self.attempt(self.arena.shrink)
        self.arena.close()
        assert self.arena.closed


def left():
    quiesce()
    return held_by_kind()


# In parts, since each of hundreds of calls is a run of its own: every so many calls, from one on.
RUNS = [
    *(("virtual", OUT_OF_MEMORY, part, 8) for part in range(8)),
    *(("virtual", INVALID_VALUE, part, 8) for part in range(8)),
    *(("virtual, wait", INVALID_VALUE, part, 8) for part in range(8)),
    ("regions", OUT_OF_MEMORY, 0, 1),
    ("regions", INVALID_VALUE, 0, 1),
]


@pytest.mark.parametrize(("backing", "error", "part", "parts"), RUNS)
def test_arena_survives_a_failure_of_any_driver_call(host, backing, error, part, parts):
    config = CONFIGS[backing]
    streams = [gpumem.Stream("host"), gpumem.Stream("host")]
    with gpumem.Arena("host", {"backing": "regions"}) as arena:
        arena.allocate(256).close()  # the stream that gives regions back stays for good
    before = left()
    calls = host.call_count()
    scenario = Scenario(config, streams)
    in_a_thread(scenario.go)
    assert not scenario.errors
    del scenario
    assert left() == before
    total = host.call_count() - calls
    failed = 0
    for number in range(part + 1, total + 1, parts):
        scenario = Scenario(config, streams)
        host.fail(None, number, error)
        print(f"driver call {number} of {total}")
        try:
            in_a_thread(scenario.go)
        finally:
            host.clear_faults()
        failed += bool(scenario.errors)
        del scenario
        assert left() == before
    assert failed, "no call mattered"

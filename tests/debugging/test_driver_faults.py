"""A failure of any driver call of a debugged arena leaves counters, blocks and guards whole."""

import gc

import pytest
from helpers.threads import in_a_thread

import gpumem
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
ERRORS = (gpumem.OutOfMemoryError, gpumem.errors.DriverError)


class Life:
    """Allocations and frees on two streams, a check and an end; refusals are counted."""

    def __init__(self, memory, streams):
        self.arena = gpumem.Arena(memory, debug_heap={"quarantine_bytes": MIB})
        self.streams = streams
        self.live: list = []
        self.refused = 0

    def attempt(self, call, *arguments):
        try:
            return call(*arguments)
        except ERRORS:
            self.refused += 1
        finally:
            self.arena.check_invariants()
            known = sorted(block.nbytes for block in self.arena.outstanding())
            assert known == sorted(buffer.nbytes for buffer in self.live)

    def take(self, nbytes, stream):
        try:
            self.live.append(self.arena.allocate(nbytes, stream))
        except ERRORS:
            self.refused += 1

    def run(self):
        first, second, _ = self.streams
        for nbytes in (100, 300_000, 700_000):
            self.take(nbytes, first)
        self.attempt(first.synchronize)
        if self.live:
            self.live.pop().close()
        self.attempt(self.arena.check_heap)
        self.take(2 * MIB, second)
        while self.live:
            buffer = self.live.pop()
            buffer.record_stream(first)
            buffer.close()
        self.attempt(self.arena.check_heap)
        self.attempt(self.arena.shrink)

    def end(self):
        assert self.arena.check_heap() == ()  # nothing was accused
        assert self.arena.stats().in_use == 0
        self.arena.close()


def alive(host):
    # What a heap makes. A pinned region that the driver refuses to take back is the backing's.
    release_retired()
    return {name: host.live()[name] for name in ("streams", "events")}


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, INVALID_VALUE])
def test_debug_heap_survives_a_failure_of_any_driver_call(host, streams, error):
    memory = "host/host_accessible"  # filled and looked at by the driver
    gc.collect()  # what earlier tests left in cycles goes now, not in the middle
    before = alive(host)
    life = Life(memory, streams)
    calls = host.call_count()
    life.run()
    total = host.call_count() - calls
    life.end()
    assert life.refused == 0
    refused = 0
    for number in range(1, total + 1):
        life = Life(memory, streams)
        host.fail(None, number, error)
        print(f"driver call {number} of {total}")
        try:
            in_a_thread(life.run)  # a pop that fails leaves its context on the thread's stack
        finally:
            host.clear_faults()
        refused += life.refused
        life.end()
        del life
        assert alive(host) == before
    assert refused > 10, "hardly a call mattered"

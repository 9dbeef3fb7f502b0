"""Ctrl-C ends an arena's waits for the device; the arena is as before."""

import pytest
from helpers.driver import HostDriver
from helpers.interrupting import interrupted, more_calls

import gpumem

MIB = 1 << 20
HOUR_MS = 3_600_000


@pytest.fixture
def streams():
    return [gpumem.Stream("host") for _ in range(2)]


def held_memory(arena, stream, nbytes=MIB - 256):
    """Free a block whose stream is held; the gate."""
    driver, buffer = HostDriver(), arena.allocate(nbytes, stream)
    gate = driver.block(stream)
    driver.fill(buffer, 1, stream)
    buffer.close()
    return gate


@pytest.mark.parametrize("debug_heap", [False, True])
def test_interrupt_ends_the_wait_for_memory(host, make_arena, streams, debug_heap):
    config = {"max_mem": MIB, "split_rule": "tight", "oom_wait_ms": HOUR_MS}
    arena = make_arena(config, debug_heap=debug_heap)
    pin = arena.allocate(256, streams[0])
    nbytes = MIB // 2 if debug_heap else MIB - 256
    with held_memory(arena, streams[0], nbytes) as gate:
        before = arena.stats()
        with interrupted(more_calls(host, "cuEventQuery", 20), gate):
            arena.allocate(nbytes, streams[1])
        after = arena.stats()
        assert (after.in_use, after.num_allocs) == (before.in_use, before.num_allocs)
        gate.open()
        arena.allocate(nbytes, streams[1]).close()
    pin.close()
    streams[1].synchronize()


def test_interrupt_ends_a_suspend(host, make_arena, streams):
    arena = make_arena({"backing": "virtual"})
    kept = arena.allocate(MIB)
    with held_memory(arena, streams[0]) as gate:
        with interrupted(more_calls(host, "cuEventQuery", 20), gate):
            arena.sleep()
        arena.allocate(256, streams[0]).close()
        gate.open()
        assert arena.sleep() > 0
    arena.wake()
    kept.close()


def test_interrupt_ends_a_close(host, streams):
    arena = gpumem.Arena("host", {"backing": "virtual"})
    with held_memory(arena, streams[0]) as gate:
        with interrupted(more_calls(host, "cuEventQuery", 20), gate):
            arena.close()
        assert not arena.closed
        arena.allocate(256, streams[0]).close()
        gate.open()
        arena.close()
    assert arena.closed

"""Commits that wait for memory: other threads go on, and Ctrl-C ends the wait."""

from __future__ import annotations

import threading

import pytest
from helpers.driver import HostDriver
from helpers.interrupting import interrupted, more_calls
from helpers.waiting import wait_until, without_waiting

import gpumem

MIB = 1 << 20
HOUR_MS = 3_600_000


def cache_of(arena, **settings):
    return arena.virtual((32, MIB), "uint8", step=2, **settings)


@pytest.fixture
def full(host, make_arena):
    """An arena of 8 MiB, of which 4 are left behind work that a gate holds."""
    arena, stream = make_arena({"max_mem": 8 * MIB, "oom_wait_ms": HOUR_MS}), gpumem.Stream("host")
    old = cache_of(arena, committed=4, stream=stream)
    with HostDriver().block(stream) as gate:
        HostDriver().fill(old.tensor(0, 1), 1, stream)
        old.release(0, 4)
        yield arena, gate
    stream.synchronize()


@pytest.mark.parametrize("call", ["commit", "resize"])
def test_release_of_another_thread_ends_the_wait_of_the_same_tensor(host, full, call):
    arena, gate = full
    cache = cache_of(arena, committed=2)
    cache.commit(20, 22)
    waits = more_calls(host, "cuEventQuery", 20)
    rows = {"commit": (2, 4), "resize": (4,)}[call]
    thread = threading.Thread(target=getattr(cache, call), args=rows, daemon=True)
    thread.start()
    with without_waiting(gate):
        wait_until(waits)
        cache.record_stream(gpumem.Stream("host"))
        assert cache.tensor(0, 2).shape[0] == 2
        cache.release(20, 22)
        wait_until(lambda: not thread.is_alive())
    assert cache.rows == ((0, 4),)
    assert cache.held_nbytes == 4 * MIB


@pytest.mark.parametrize(
    "call",
    [
        lambda arena, cache: cache.commit(8),
        lambda arena, cache: cache.resize(8),
        lambda arena, cache: cache_of(arena, committed=8),
    ],
)
def test_interrupt_ends_the_wait_of_a_commit(host, full, call):
    arena, gate = full
    cache = cache_of(arena)
    with interrupted(more_calls(host, "cuEventQuery", 20), gate):
        call(arena, cache)
    assert cache.rows == ()
    gate.open()
    cache.commit(8)
    assert cache.committed == 8
    cache.close()  # from 3.13 on the exception's frames keep it until the collector runs


def test_close_of_another_thread_ends_the_wait(host, full):
    arena, gate = full
    cache = cache_of(arena, committed=4)
    errors = []

    def commit():
        try:
            cache.commit(8)
        except gpumem.errors.ClosedError as error:
            errors.append(error)

    waits = more_calls(host, "cuEventQuery", 20)
    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    with without_waiting(gate):
        wait_until(waits)
        cache.close()
        wait_until(lambda: not thread.is_alive())
    assert len(errors) == 1

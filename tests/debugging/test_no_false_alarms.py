"""Programs that keep the rules, at random and on several threads: nothing is found."""

import threading

import numpy as np
import pytest
from helpers.threads import in_threads

import gpumem

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("reuse", ["completed", "wait", "never"])
def test_random_programs_on_lagging_streams_give_no_report(
    make_arena, memory, rng, host, driver, streams, reuse
):
    host.set_lag(200_000)
    options = {"quarantine_bytes": rng.choice([0, 64 * KIB, 64 * MIB])}
    config = {"stream_reuse": reuse, "max_mem": rng.choice([0, 64 * MIB])}
    arena = make_arena(config, memory=memory, debug_heap=options)
    live = []
    for step in range(600):
        what = rng.random()
        if what < 0.5:
            stream = rng.choice(streams)
            size = rng.choice([1, 100, 256, 5000, 70_000, 700_000])
            buffer = arena.allocate(size, stream, alignment=rng.choice([None, None, 4096]))
            driver.fill(buffer, step & 255, stream)
            live.append((buffer, stream))
        elif what < 0.9 and live:
            buffer, stream = live.pop(rng.randrange(len(live)))
            end(buffer, stream, rng, streams, driver)
        elif what < 0.93:
            arena.check_heap(wait=rng.random() < 0.5)
        elif what < 0.95:
            arena.shrink()
        elif what < 0.97 and arena.backing == "virtual":
            arena.sleep()
            arena.wake()
        elif live:
            buffer, stream = rng.choice(live)
            driver.fill(buffer, 1, stream)
    for buffer, stream in live:
        end(buffer, stream, rng, streams, driver)
    assert arena.check_heap() == ()
    arena.check_invariants()
    assert arena.stats().in_use == 0


def end(buffer, stream, rng, streams, driver):
    """Free a block as a program may: with other streams' work recorded, or ordered by an event."""
    way, other = rng.random(), rng.choice(streams)
    if way < 0.3:
        other.wait(stream.record())
        buffer.record_stream(other)
        driver.fill(buffer, 2, other)
        buffer.close()
    elif way < 0.5:
        other.wait(stream.record())
        driver.fill(buffer, 3, other)
        buffer.close(other)
    else:
        buffer.close()


def test_threads_allocate_check_and_free_each_others_blocks(make_arena, memory):
    arena = make_arena(memory=memory, debug_heap={"quarantine_bytes": 256 * KIB})
    failures, shelf, lock = [], [], threading.Lock()

    def work(number):
        stream = gpumem.Stream("host")
        try:
            for step in range(150):
                buffer = arena.allocate(1 + 997 * step % 9000, stream)
                np.from_dlpack(buffer)[:] = number
                with lock:
                    shelf.append(buffer)
                    other = shelf.pop(0)
                del buffer
                assert len(other) > 0
                if step % 2:
                    other.close()
                del other
                if step % 50 == 0:
                    arena.check_heap(wait=False)
            stream.synchronize()
        except BaseException as error:
            failures.append(error)

    in_threads(work, range(4))
    assert failures == []
    shelf.clear()
    assert arena.check_heap() == ()
    assert arena.stats().in_use == 0


def test_own_copies_and_fills_give_no_report(monkeypatch, rng):
    monkeypatch.setenv("GPUMEM_DEBUG_HEAP", "1")
    arenas = [gpumem.Arena(memory) for memory in ("host", "host/host_accessible")]
    for _ in range(50):
        shape = rng.randrange(1, 70), rng.randrange(1, 70)
        a, b = (gpumem.zeros(shape, "float32", resource=arena) for arena in arenas)
        row, column = rng.randrange(shape[0]), rng.randrange(shape[1])
        gpumem.copy(b[row:, column:], a[row:, column:])
        gpumem.copy(a, b)
        assert b.numpy().sum() == 0
        del a, b
    for arena in arenas:
        assert arena.check_heap() == ()
        arena.close()

"""Ctrl-C ends a replay within its events."""

import numpy as np
from helpers.interrupting import interrupted

import gpumem
from gpumem.replay._replay import run
from gpumem.traces import Trace

PAIRS = 2_000_000


def test_interrupt_ends_a_replay(make_arena):
    arena = make_arena()
    trace = Trace(
        action=np.tile([0, 2], PAIRS),
        block=np.repeat(np.arange(PAIRS), 2),
        size=np.full(2 * PAIRS, 4096),
        stream=np.zeros(2 * PAIRS, int),
        time_us=np.arange(2 * PAIRS),
    )
    with interrupted(lambda: arena.stats().num_allocs):
        run(arena, [gpumem.Stream("host")], trace, False)
    stats = arena.stats()
    assert 0 < stats.num_allocs < PAIRS
    assert stats.in_use == 0

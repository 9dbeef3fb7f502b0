"""Ctrl-C ends a replay within its events."""

import inspect

import numpy as np
from helpers import child
from helpers.interrupting import interrupted

import gpumem
from gpumem.replay._replay import run
from gpumem.traces import Trace

PAIRS = 5_000_000


def trace_of_pairs(pairs: int) -> Trace:
    """Return a trace of so many allocations of 4 KiB, each followed by its free."""
    return Trace(
        action=np.tile([0, 2], pairs),
        block=np.repeat(np.arange(pairs), 2),
        size=np.full(2 * pairs, 4096),
        stream=np.zeros(2 * pairs, int),
        time_us=np.arange(2 * pairs),
    )


def test_interrupt_ends_a_replay(arena):
    trace = trace_of_pairs(PAIRS)
    with interrupted(lambda: arena.stats().num_allocs):
        run(arena, [gpumem.Stream("host")], trace, False)
    stats = arena.stats()
    assert 0 < stats.num_allocs < PAIRS
    assert stats.in_use == 0


def test_interrupt_ends_a_replay_of_slow_events():
    """It is looked for by the time that passed, not only after thousands of events."""
    child.run_quietly(f"""
import signal, threading, time
import numpy as np
import gpumem
from gpumem.replay._replay import run
from helpers.held_call import held_call
from gpumem.traces import Trace
from helpers.waiting import wait_until

{inspect.getsource(trace_of_pairs)}

trace = trace_of_pairs(2000)
arena = gpumem.Arena("host", {{"backing": "regions"}})
stream = gpumem.Stream("host")
main = threading.main_thread().ident

def interrupt():
    end = time.monotonic() + 0.2
    wait_until(lambda: time.monotonic() > end)
    signal.pthread_kill(main, signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with held_call("cuMemAlloc", meanwhile=interrupt):
        run(arena, [stream], trace, False)
except KeyboardInterrupt:
    assert arena.stats().num_allocs < 100, arena.stats()
else:
    raise SystemExit("not interrupted")
""")

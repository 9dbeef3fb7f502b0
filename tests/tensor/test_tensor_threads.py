"""Tensors and their views dropped by several threads, in any order, also while the process ends."""

import gc
import threading

import numpy as np
import pytest
from helpers import child, dlpack
from helpers.threads import in_threads

import gpumem

THREADS = 4
ROUNDS = 60


def views_of(tensor):
    """One of each kind of thing that keeps a tensor's memory, the tensor among them."""
    return [
        tensor,
        tensor.buffer,
        tensor[1:],
        tensor.as_read_only().numpy(),
        tensor.numpy(),
        np.from_dlpack(tensor),
        np.from_dlpack(tensor.buffer),
        np.asarray(tensor),
        memoryview(tensor),
        memoryview(tensor.buffer),
        gpumem.asarray(tensor.numpy()),
        tensor.__dlpack__(),
        tensor.__dlpack__(max_version=(1, 0)),
    ]


def test_last_of_many_threads_frees_the_block(arena, rng):
    """Each view goes to some thread; all threads drop at once, and the books are right after."""
    for _ in range(ROUNDS):
        views = views_of(gpumem.full((4, 8), 3, "i4", resource=arena))
        rng.shuffle(views)
        hands = [[] for _ in range(THREADS)]
        while views:
            rng.choice(hands).append(views.pop())
        barrier = threading.Barrier(THREADS)

        def drop(mine, barrier=barrier):
            barrier.wait()
            while mine:
                mine.pop()

        in_threads(drop, hands)
        assert arena.stats().in_use == 0


def test_deleters_without_the_gil_race_with_new_views(arena, host, driver):
    """Claims begin here while a stream's worker ends others: the block goes exactly once."""
    stream = gpumem.Stream("host")
    for _ in range(20):
        tensor = gpumem.full((4, 8), 3, "i4", resource=arena)
        consumed = []
        for _ in range(50):
            consumed.append(dlpack.consume(tensor.__dlpack__(max_version=(1, 0))))
            consumed[-1].delete_on(driver, stream)
            np.from_dlpack(tensor)
        del tensor
        stream.synchronize()
        assert arena.stats().in_use == 0


SETUP = """
import threading, time
import numpy as np
import gpumem
arena = gpumem.Arena("host")
def views():
    tensor = gpumem.full((4, 8), 3, "i4", resource=arena)
    return [tensor, tensor[1:], tensor.numpy(), np.from_dlpack(tensor), memoryview(tensor),
            tensor.__dlpack__(), tensor.__dlpack__(max_version=(1, 0)), tensor.buffer]
"""


@pytest.mark.parametrize(
    "body",
    [
        "kept = views()",
        "kept = views()[::-1]; kept.append(kept)",
        "kept = views(); del arena",
        "kept = views()[2:5]; del arena, views",
        "import sys; sys.kept = [views() for _ in range(20)]",
        "import atexit; kept = views(); atexit.register(kept.clear)",
        "import atexit; atexit.register(lambda: views())",
    ],
)
def test_exit_with_live_views(body):
    child.run_quietly(SETUP + body)


def test_exit_while_daemon_threads_make_and_drop_views():
    """They may be told that it ends, by an exception; the process must not crash or hang."""
    done = child.run(
        SETUP
        + """
threading.excepthook = lambda _: None
rounds = [0] * 3
def work(number):
    held = []
    while True:
        held.append(views())
        rounds[number] += 1
        if len(held) > 5:
            held.pop(0)
for number in range(3):
    threading.Thread(target=work, args=(number,), daemon=True).start()
while min(rounds) < 20:
    time.sleep(0)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_views_in_collected_cycles_leave_nothing(arena):
    class Holder:
        pass

    for _ in range(20):
        holder = Holder()
        holder.views = views_of(gpumem.full((4, 8), 3, "i4", resource=arena))
        holder.itself = holder
    del holder
    gc.collect()
    assert arena.stats().in_use == 0


def test_tensors_of_threads_have_the_dtype_that_each_asked_for(arena):
    # One that is found by identity is remembered: without the interpreter lock, another's too.
    barrier, wrong = threading.Barrier(3), []

    def make(dtype):
        barrier.wait()
        for _ in range(1000):
            made = gpumem.empty((2,), dtype, resource=arena)
            if made.dtype != np.dtype(dtype):
                wrong.append((dtype, made.dtype))

    in_threads(make, ("i1", "f8", "i2"))
    assert not wrong

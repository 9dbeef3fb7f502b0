"""Two processes work on one tensor: one call makes a handle of it, one call there a tensor.

A timeline in shared memory orders their access: neither process polls, and nothing is copied. Runs
anywhere; on a machine with a GPU the tensor can lie in GPU memory just as well:

    python examples/two_processes.py
    python examples/two_processes.py cuda:0
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import gpumem
from gpumem import interop

ROUNDS = 10


def worker(inbox: Connection) -> None:
    """Double what the other process wrote, in turns."""
    handle, turns = inbox.recv()
    tensor = interop.attach(handle)
    handle.close()
    for turn in range(ROUNDS):
        turns.wait(2 * turn + 1, timeout=60)
        mine = tensor.to("host", copy=True)
        mine.numpy()[...] *= 2
        gpumem.copy(tensor, mine)
        gpumem.Stream.from_handle(tensor.device, 0).synchronize()
        turns.signal(2 * turn + 2)


def main(memory: str) -> int:
    """Add one, let the worker double, and see that every round was seen by both."""
    arena = gpumem.Arena(memory)
    buffer = arena.allocate(4096, shareable=True)
    tensor = gpumem.from_dlpack(buffer).view("float32").reshape((32, 32))
    turns = interop.HostTimeline.create()
    context = multiprocessing.get_context("spawn")
    outbox, inbox = context.Pipe()
    other = context.Process(target=worker, args=(inbox,))
    other.start()
    with interop.export(tensor) as handle:
        outbox.send((handle, turns))
        expected = 0.0
        for turn in range(ROUNDS):
            mine = tensor.to("host", copy=True)
            mine.numpy()[...] += 1
            gpumem.copy(tensor, mine)
            gpumem.Stream.from_handle(tensor.device, 0).synchronize()
            turns.signal(2 * turn + 1)
            turns.wait(2 * turn + 2, timeout=60)
            expected = 2 * (expected + 1)
    other.join()
    seen = tensor.to("host").numpy()
    print(f"{memory}: {ROUNDS} rounds, every element is {seen[0, 0]:.0f}, expected {expected:.0f}")
    return int(not (seen == expected).all() or other.exitcode != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "host"))

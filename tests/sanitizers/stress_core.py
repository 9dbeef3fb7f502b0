"""Every way in and out of arenas and tensors: the program that run.py runs in a sanitized build.

Its argument is the seed that drives it; its last line says that it reached the end.
"""

import ctypes
import os
import random
import sys
import threading
from contextlib import suppress

import numpy as np

import gpumem
from gpumem._testing import host_device

KIB, MIB = 1 << 10, 1 << 20


def mixed(rng, config, rounds):
    """Allocate, free on this and other streams, share, shrink and reset, in random order."""
    arena = gpumem.Arena("host", {"max_mem": 64 * MIB, **config})
    streams = [None, *(gpumem.Stream("host") for _ in range(3))]
    held = []
    for _ in range(rounds):
        action = rng.random()
        if action < 0.5:
            size = rng.choice([0, 1, 256, 5000, rng.randrange(1, 3 * MIB)])
            try:
                held.append(arena.allocate(size, rng.choice(streams)))
            except gpumem.OutOfMemoryError:
                held.clear()
        elif held and action < 0.9:
            buffer = held.pop(rng.randrange(len(held)))
            if isinstance(buffer, gpumem.Buffer) and buffer.nbytes:
                ctypes.memset(buffer.ptr, 1, buffer.nbytes)
                buffer.close(rng.choice(streams))
        elif held and action < 0.94:
            buffer = rng.choice(held)
            if isinstance(buffer, gpumem.Buffer) and not buffer.closed:
                version = rng.choice([None, (1, 0)])
                held += [memoryview(buffer), buffer.__dlpack__(max_version=version)]
        elif action < 0.97:
            with suppress(gpumem.OutOfMemoryError):
                held.append(arena.allocate_persistent(rng.randrange(1, 100 * KIB)))
        elif action < 0.985:
            stream = rng.choice(streams[1:])
            stream.synchronize()
            arena.reset_stream(stream)
        else:
            arena.shrink()
            arena.blocks()
        arena.check_invariants()
    held.clear()
    buffer = None  # the loop's last
    arena.close()


def refusals():
    """Sizes, streams and exports that cannot be."""
    arena = gpumem.Arena("host")
    arena.allocate(300).close()
    for size in ((1 << 48) - 1, 1 << 48, 1 << 62, 1 << 80, -1, "x"):
        for allocate in (arena.allocate, arena.allocate_persistent):
            with suppress(gpumem.OutOfMemoryError, ValueError, TypeError):
                allocate(size)
    buffer = arena.allocate(100)
    for arguments in ({"max_version": ()}, {"max_version": (1,)}, {"copy": True}, {"stream": 5}):
        with suppress(BufferError, ValueError):
            buffer.__dlpack__(**arguments)

    class Pair:
        def __init__(self, answer):
            self.answer = answer

        def __cuda_stream__(self):
            return self.answer

    for answer in ((), (0,), (0, 1), (0, 1, 2), None):
        with suppress(TypeError):
            arena.allocate(10, Pair(answer))


def closed_while_its_stream_is_read():
    arena = gpumem.Arena("host")
    buffer = arena.allocate(1000)
    view = memoryview(buffer)

    class Closes:
        def __cuda_stream__(self):
            buffer.close()
            return 0, 0

    buffer.close(Closes())
    view[0] = 1
    view.release()


def threads(seed):
    arena = gpumem.Arena("host", {"stream_reuse": "wait"})

    def work(number):
        rng = random.Random(seed + number)
        stream = gpumem.Stream("host")
        held = []
        for _ in range(1500):
            held.append(arena.allocate(rng.randrange(1, 50 * KIB), stream))
            if len(held) > 10:
                held.pop(rng.randrange(10))
            if rng.random() < 0.05:
                arena.allocate_persistent(1000).close()
                arena.shrink()
                arena.stats()
                arena.snapshot()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    arena.close()


def tensors(rng, rounds):
    """Make tensors and their views, hand them on through each protocol, copy, drop in any order."""
    arena = gpumem.Arena("host", {"max_mem": 256 * MIB})
    streams = [None, *(gpumem.Stream("host") for _ in range(2))]
    held = []
    for _ in range(rounds):
        held.append(made(rng, arena, rng.choice(streams)))
        seen = viewed(rng, rng.choice([one for one in held if isinstance(one, gpumem.Tensor)]))
        held.append(seen)
        with suppress(BufferError, ValueError, TypeError):
            held.append(shown(rng, seen))
        arrays = [one for one in held if isinstance(one, gpumem.Tensor | np.ndarray)]
        src = rng.choice(arrays)
        with suppress(BufferError, ValueError):
            dst = gpumem.empty(src.shape, src.dtype, resource=arena)
            gpumem.copy(viewed(rng, dst) if rng.random() < 0.2 else dst, src, rng.choice(streams))
            held.append(dst)
        rng.shuffle(held)
        del held[25:]
        if not any(isinstance(one, gpumem.Tensor) for one in held):
            held.append(gpumem.zeros(3, "i4", resource=arena))
    del held[:], seen, src, arrays, dst
    gpumem.Device("host").synchronize()
    arena.close()


def made(rng, arena, stream):
    shape = tuple(rng.randrange(7) for _ in range(rng.randrange(7)))
    dtype = rng.choice(["?", "i1", "u2", "f4", "c16", "S5", ">i8"])
    make = rng.choice([gpumem.empty, gpumem.zeros])
    return make(shape, dtype, resource=arena, stream=stream)


def viewed(rng, tensor):
    steps = [slice(None), slice(None, None, -1), slice(1, None, 2), slice(2, 1)]
    key = tuple(rng.choice(steps) for _ in range(rng.randrange(tensor.ndim + 1)))
    seen = tensor[(*key, ..., None)]
    return rng.choice([seen, seen.reshape(-1), tensor.as_read_only(), tensor.contiguous()])


def shown(rng, tensor):
    show = rng.choice(
        [
            lambda: tensor.numpy(),
            lambda: np.from_dlpack(tensor),
            lambda: memoryview(tensor),
            lambda: np.asarray(tensor, "S9"),
            lambda: tensor.__dlpack__(copy=rng.choice([None, True])),
            lambda: tensor.__dlpack__(max_version=(1, 0), dl_device=(1, 0)),
            lambda: tensor.__dlpack__(dl_device=(2, 0)),
            lambda: gpumem.from_dlpack(np.from_dlpack(tensor), copy=rng.choice([None, True])),
            lambda: gpumem.asarray(tensor.numpy()),
            lambda: tensor.to("host/host_accessible", copy=True),
        ]
    )
    return show()


def large_copies():
    """Copy by several threads, and through the staging ring."""
    pageable = np.arange(3 << 21, dtype="i4").reshape(3, -1)
    for memory in ("host", "host/managed", "host/host_accessible"):
        tensor = gpumem.empty(pageable.shape, "i4", memory=memory)
        for part in (slice(None), slice(None, None, -1)):
            gpumem.copy(tensor[:, part], pageable)
            back = np.empty_like(pageable)
            gpumem.copy(back, tensor[:, part])
            assert np.array_equal(back, pageable)


def dropped_without_a_close():
    for _ in range(20):
        buffer = gpumem.Arena("host").allocate(1000)
        capsule = buffer.__dlpack__()
        del buffer
        del capsule
    _ = gpumem.Device("host").free_bytes


def views_that_end_on_worker_threads():
    """A copy's view of others' memory ends on a worker thread while its buffer is dropped."""
    arena = gpumem.Arena("host")
    stream = gpumem.Stream("host")
    dst = gpumem.empty(64, "u1", resource=arena)
    for _ in range(1000):
        exported = np.from_dlpack(gpumem.empty(64, "u1", resource=arena))
        gpumem.copy(dst, gpumem.from_dlpack(exported), stream)
    stream.synchronize()
    gpumem.Device("host").synchronize()
    del dst, exported
    _ = gpumem.Device("host").free_bytes  # waits for the workers
    arena.close()


def a_fork_that_starts_anew():
    """The child's devices replace the parent's, which its inherited arenas still point to."""
    arena = gpumem.Arena("host")
    buffer = arena.allocate(1000)
    capsule = buffer.__dlpack__()
    child = os.fork()
    if child == 0:
        own = gpumem.Arena("host")
        own.allocate(1000).close()
        del arena, buffer
        gpumem.Arena("host").close()
        del capsule
        own.allocate(1 << 24).close()
        own.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(seed: int) -> None:
    rng = random.Random(seed)
    a_fork_that_starts_anew()  # first: nothing else may keep the parent's devices alive
    refusals()
    closed_while_its_stream_is_read()
    dropped_without_a_close()
    for split_rule in ("tight", "ort"):
        for reuse in ("completed", "wait", "never"):
            mixed(rng, {"split_rule": split_rule, "stream_reuse": reuse}, 2000)
    tensors(rng, 1500)
    large_copies()
    views_that_end_on_worker_threads()
    mixed(rng, {"extend_strategy": "same_as_requested", "enable": False}, 1000)
    host_device.use_virtual_clock(True)
    host_device.set_lag(1000)
    mixed(rng, {"stream_reuse": "wait"}, 2000)
    host_device.set_lag(0)
    host_device.use_virtual_clock(False)
    threads(seed)
    print("reached the end")


main(int(sys.argv[1]))

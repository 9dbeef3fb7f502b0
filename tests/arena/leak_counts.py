"""Whole lives of arenas, budgets, streams and threads, and what each leaves on the heap.

Run in a process of its own, in which nothing else allocates: python -m arena.leak_counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import threading
from itertools import pairwise
from statistics import median

from helpers.waiting import wait_until

import gpumem
from gpumem._testing import host_device

KIB, MIB = 1 << 10, 1 << 20
RAW = 0x7000_0000_0000  # handles of streams that are never passed to the driver


def use(arena: gpumem.Arena) -> None:
    """Leave cached, free, pending and recorded blocks of several streams behind."""
    streams = [gpumem.Stream("host") for _ in range(3)]
    for stream in (*streams, 2, None):
        held = [arena.allocate(nbytes, stream) for nbytes in (256, 5000, 5000, 100 * KIB, MIB)]
        held[1].record_stream(streams[0])
        held[2].record_stream(held[2].stream)
        held[3].record_stream(streams[1])
        held[3].record_stream(streams[2])
        held.clear()
    arena.allocate_persistent(1000).close()


def in_another_thread(work, *arguments) -> None:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()
    # Python's part of it has ended; what the C library and gpumem keep for it ends with the rest.
    wait_until(lambda: not os.path.exists(f"/proc/self/task/{thread.native_id}"))


def arena_of(backing: str) -> None:
    arena = gpumem.Arena("host", {"backing": backing})
    use(arena)
    in_another_thread(use, arena)
    arena.close()


def moving_and_sleeping() -> None:
    """Blocks of pages that move, and a sleep that copies what lives to the host."""
    arena = gpumem.Arena("host", {"backing": "virtual", "page_move_threshold": 0})
    stream = gpumem.Stream("host")
    held = [arena.allocate(size * MIB, stream) for size in (4, 2, 4)]
    held[0].close()
    held[2].close()
    held += [arena.allocate(8 * MIB, stream), arena.allocate_persistent(1000)]
    arena.shrink()
    arena.sleep()
    arena.wake()


def refused() -> None:
    """Driver calls that fail, memory that is not taken back at once, and a size without end."""
    arena = gpumem.Arena("host", {"backing": "virtual"})
    arena.allocate(4 * MIB).close()
    host_device.fail("cuMemRelease", 1, 1, 2)
    arena.shrink()
    for call in ("cuMemCreate", "cuMemMap"):
        host_device.fail(call, 1, 1)
        with contextlib.suppress(gpumem.errors.DriverError):
            arena.allocate(5 * MIB)
            raise AssertionError(f"{call} did not fail")
    host_device.clear_faults()
    with contextlib.suppress(gpumem.OutOfMemoryError):
        arena.allocate(1 << 47)
        raise AssertionError("no machine has that much memory")


def budgets() -> None:
    """A tree of budgets with long names, of arenas that count in either way."""
    root = gpumem.Budget(8 * MIB, name="r" * 100)
    children = [gpumem.Budget(None, parent=root, name=f"{i}" * 100) for i in range(3)]
    for count in ("reserved", "in_use"):
        arena = gpumem.Arena("host", {"backing": "virtual"}, budget=children[0], count=count)
        with arena.allocate(MIB), contextlib.suppress(gpumem.errors.BudgetExceededError):
            arena.allocate(9 * MIB)
            raise AssertionError("the budget was exceeded")
    root.holders()


class StreamAndThread:
    """A stream that is used, recorded and reset, and a thread, both of one arena that stays."""

    def __init__(self) -> None:
        self.arena = gpumem.Arena("host", default_stream=2)
        self.handles = itertools.count(RAW + 1)

    def __call__(self) -> None:
        handle = next(self.handles)
        for nbytes in (KIB, 100 * KIB):
            buffer = self.arena.allocate(nbytes, handle)
            buffer.record_stream(RAW)
            self.arena.reset_stream(RAW)  # ends the recorded use
            buffer.close()
        self.arena.reset_stream(handle)
        in_another_thread(lambda: self.arena.allocate(KIB).close())


class Mallinfo(ctypes.Structure):
    """What glibc says of malloc's memory: struct mallinfo2 of mallinfo(3)."""

    _fields_ = [
        ("others", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),
        ("more", ctypes.c_size_t * 2),
        ("handed_out", ctypes.c_size_t),
        ("rest", ctypes.c_size_t * 2),
    ]


def heap_bytes() -> int:
    """Count what malloc has handed out; Python's small objects are not among it."""
    look = ctypes.CDLL(None).mallinfo2
    look.restype = Mallinfo
    gc.collect()
    gpumem.Device("host").synchronize()  # what is queued is on the heap until a worker has done it
    gpumem.Device("host").free_bytes  # noqa: B018  # gives back what nothing refers to
    found = look()
    return found.handed_out + found.mapped


def mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


def left_by_a_turn(work, turns: int) -> list[float]:
    """Measure what a turn leaves of the heap and of addresses: the median of three such rows.

    Medians, because caches of the C library grow now and then; the first two rows fill them.
    """
    seen = []
    for _ in range(6):
        seen.append((heap_bytes(), mapped_bytes()))
        for _ in range(turns):
            work()
    rows = [[(b - a) / turns for a, b in zip(*pair, strict=True)] for pair in pairwise(seen)]
    return [median(grown) for grown in zip(*rows[2:], strict=True)]


def lives():
    """Yield names, what to do in turn, and how often before a look."""
    for backing in ("regions", "virtual"):
        yield f"arena, {backing}", lambda backing=backing: arena_of(backing), 8
    for life in (moving_and_sleeping, refused, budgets):
        yield life.__name__, life, 6
    # The slots of ended threads' streams are looked for in each of these rows, but not each turn.
    yield "stream and thread", StreamAndThread(), 70


if __name__ == "__main__":
    for name, work, turns in lives():
        print(f"{name}:", *left_by_a_turn(work, turns))

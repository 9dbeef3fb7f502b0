"""Host memory for metadata: what has ended leaves none behind."""

from __future__ import annotations

import ctypes
import gc

import pytest

import gpumem
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
LIVES = 30
LEAST = 16  # bytes that malloc gives for the smallest request


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost
    _fields_ = [(name, ctypes.c_size_t) for name in ("f0", "f1", "f2", "f3", "mapped")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("f5", "f6", "in_use", "f8", "f9")]


def from_malloc():
    """Return the bytes that this thread's heap has handed out."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("the C library does not tell how much malloc has handed out")
    mallinfo.restype = Mallinfo
    gc.collect()
    release_retired()
    told = mallinfo()
    return told.in_use + told.mapped


def paged():
    arena = gpumem.Arena("host", {"backing": "virtual", "page_move_threshold": 0})
    stream = gpumem.Stream("host")
    held = [arena.allocate(size * MIB, stream) for size in (4, 2, 4)]
    held[0].close()
    held[2].close()
    held += [arena.allocate(8 * MIB, stream), arena.allocate_persistent(1000)]
    arena.shrink()
    arena.shrink()
    arena.sleep()
    arena.wake()


def refused(host):
    arena = gpumem.Arena("host", {"backing": "virtual"})
    arena.allocate(4 * MIB).close()
    host.fail("cuMemRelease", 1, 1, 2)
    arena.shrink()
    for call in ("cuMemCreate", "cuMemMap"):
        host.fail(call, 1, 1)
        with pytest.raises(gpumem.errors.DriverError):
            arena.allocate(5 * MIB)
    host.clear_faults()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(1 << 47)


def budgets():
    root = gpumem.Budget(8 * MIB, name="r" * 100)
    children = [gpumem.Budget(None, parent=root, name=f"{i}" * 100) for i in range(3)]
    for count in ("reserved", "in_use"):
        arena = gpumem.Arena("host", {"backing": "virtual"}, budget=children[0], count=count)
        with arena.allocate(MIB), pytest.raises(gpumem.errors.BudgetExceededError):
            arena.allocate(9 * MIB)
    root.holders()


def regions():
    arena = gpumem.Arena("host", {"backing": "regions"})
    held = [arena.allocate(size) for size in (100, MIB, 3 * MIB)]
    arena.allocate_persistent(1000).close()
    del held
    arena.shrink()


@pytest.mark.parametrize("life", [paged, refused, budgets, regions])
def test_whatever_ends_gives_its_host_memory_back(host, life):
    def growth():
        before = from_malloc()
        for _ in range(LIVES):
            life(host) if life is refused else life()
        return from_malloc() - before

    growth()  # what is made once
    # What is lost is lost each time; the interpreter's own use goes up and down.
    assert min(growth() for _ in range(4)) < LIVES * LEAST

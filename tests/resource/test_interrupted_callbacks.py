"""Ctrl-C inside a callback of a user reaches the program, whoever called the callback."""

from __future__ import annotations

import _thread
import signal
import sys

import pytest
from helpers.c_arena import CArena
from helpers.interrupting import reaches_the_caller
from helpers.resources import Plain

import gpumem
from gpumem._testing.integrations import Blocks

MIB = 1 << 20


def interrupt(*_):
    raise KeyboardInterrupt


class Heap:
    """Callbacks over memory of their own; a free is interrupted while `interrupts` is true."""

    def __init__(self):
        self.plain = Plain()
        self.interrupts = True

    def alloc(self, nbytes):
        return self.plain.allocate_raw(nbytes, None)

    def free(self, address, *_):
        self.plain.deallocate_raw(address, 0, None)
        if self.interrupts:
            interrupt()


class Interrupted(Plain):
    def deallocate_raw(self, ptr, nbytes, stream):
        super().deallocate_raw(ptr, nbytes, stream)
        interrupt()


# ---- callbacks whose exceptions have no caller ---------------------------------------------------


@pytest.mark.parametrize("end", ["close", "drop", "view"])
def test_interrupt_in_an_external_free_reaches_the_main_thread(end):
    heap = Heap()
    with gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host") as allocator:
        held = [allocator.allocate(100)]
        if end == "view":
            held[0] = memoryview(held[0])
        reaches_the_caller(held[0].close if end == "close" else held.clear)
        assert not heap.plain.blocks
        assert allocator.stats().num_frees == 1


def test_interrupt_on_another_thread_reaches_the_main_thread():
    heap = Heap()
    with gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host") as allocator:
        held = [allocator.allocate(100)]

        def drop():
            # By a bare lock: Ctrl-C inside `Thread.start` or `join` may break theirs.
            done = _thread.allocate_lock()
            done.acquire()
            _thread.start_new_thread(lambda: (held.clear(), done.release()), ())
            while not done.acquire(timeout=0.01):
                pass

        reaches_the_caller(drop)


def test_interrupt_in_an_external_empty_cache_reaches_the_main_thread():
    heap = Heap()
    heap.interrupts = False
    with gpumem.ExternalAllocator(heap.alloc, heap.free, interrupt, memory="host") as allocator:
        reaches_the_caller(allocator.allocate_persistent(100).close)


@pytest.mark.parametrize("make", ["external", "raw"])
def test_interrupt_in_one_of_many_frees_leaves_no_block_behind(make):
    heap = Heap()
    freed = []

    def free(address, *_):
        freed.append(address)
        heap.interrupts = len(freed) % 3 == 1
        heap.free(address)

    if make == "external":
        resource = gpumem.ExternalAllocator(heap.alloc, free, memory="host")
    else:
        resource = Plain()
        resource.deallocate_raw = free
        resource.allocate_raw = lambda nbytes, stream: heap.alloc(nbytes)
    buffers = [resource.allocate(100) for _ in range(20)]
    reaches_the_caller(buffers.clear)
    assert len(freed) == 20
    assert not heap.plain.blocks
    resource.close()


def test_interrupt_in_deallocate_raw_reaches_the_main_thread():
    resource = Interrupted()
    reaches_the_caller(resource.allocate(100).close)
    assert (resource.stats().in_use, resource.blocks) == (0, {})


def test_interrupt_in_a_log_sink_reaches_the_main_thread(make_arena):
    logged = gpumem.adaptors.log(make_arena(), lambda event: event.action == "free" and interrupt())
    reaches_the_caller(logged.allocate(100).close)
    logged = gpumem.adaptors.log(make_arena(), interrupt)
    reaches_the_caller(lambda: logged.allocate(100))
    assert logged.stats().in_use == 0


def test_interrupt_in_a_sources_free_reaches_the_main_thread(make_arena):
    heap = Heap()
    arena = make_arena(source=type("Source", (), {"allocate": heap.alloc, "free": heap.free})())
    arena.allocate(MIB).close()
    reaches_the_caller(arena.shrink)
    assert arena.stats().reserved == 0


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_interrupt_in_a_soft_limits_callback_reaches_the_main_thread(make_arena, count):
    budget = gpumem.Budget(None, soft=MIB, on_pressure=interrupt)
    arena = make_arena(budget=budget, count=count)
    reaches_the_caller(lambda: arena.allocate(4 * MIB))
    assert arena.stats().in_use == 0


def test_interrupt_in_a_callback_that_c_calls_reaches_the_main_thread(make_arena):
    arena = make_arena(budget=gpumem.Budget(MIB, on_pressure=interrupt))
    c = CArena(arena)
    reaches_the_caller(lambda: c.allocate(8 * MIB))
    assert arena.stats().in_use == 0


def test_interrupt_in_the_callback_of_a_block_by_address_reaches_the_main_thread():
    def find():
        raise KeyboardInterrupt

    reaches_the_caller(lambda: Blocks(find).deallocate(4096, 100, 0))


# ---- callbacks whose exceptions reach the caller as they are -------------------------------------


def test_interrupt_in_a_pressure_callback_ends_the_allocation(make_arena):
    arena = make_arena({"max_mem": 8 * MIB})
    rows = arena.virtual((64, MIB), "int8", committed=8, on_pressure=interrupt)
    reaches_the_caller(lambda: arena.allocate(MIB))
    assert arena.stats().in_use == rows.held_nbytes


# ---- what is no interrupt ------------------------------------------------------------------------


def test_interrupt_that_python_does_not_handle_is_reported(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Interrupted().allocate(100).close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [KeyboardInterrupt]

"""What arenas take of the host for themselves goes back with the arena, stream or thread."""

import ctypes
import os
from pathlib import Path

import pytest
from arena.refused_host_memory import PROGRAMS
from helpers import child
from helpers.child import path_with, python
from helpers.marks import NEEDS_OWN_MALLOC

TESTS = Path(__file__).parents[1]
LEAST = 16  # bytes: malloc's smallest piece takes more
PAGE = 4096
# One heap for all threads, without malloc's caches of each: what is counted is exact.
EXACT = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2") or "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="this C library does not count what malloc has handed out",
)


def test_finished_lives_leave_nothing_on_the_heap_and_no_reserved_addresses():
    done = python("-m", "arena.leak_counts", env={**EXACT, "PYTHONPATH": path_with(TESTS)})
    print(done.stdout)
    for line in done.stdout.splitlines():
        heap, mapped = map(float, line.split()[-2:])
        assert heap < LEAST, line
        assert mapped < PAGE, line
    assert line.startswith("stream and thread")


WITHOUT_HOST_MEMORY = """
from faults.kinds import HeapCalls, start_with_heap_calls
start_with_heap_calls()
import gpumem
from gpumem._testing.arenas import stream_slots

arena = gpumem.Arena("host", {"backing": "regions"})
pin = arena.allocate(256)
heap = HeapCalls()
heap.watch()
refused, due = 0, 0
while due == refused:       # until an allocation makes fewer calls than that
    due += 1
    slots, stream, block = stream_slots(arena), gpumem.Stream("host"), None
    heap.arm(due, 0)
    try:
        block = arena.allocate(1000, stream)
    except MemoryError:
        refused += 1
    heap.disarm()
    if block is not None:
        block.close()
    arena.check_invariants()
    assert stream_slots(arena) == slots + (block is not None), due
    with arena.allocate(1000, stream) as again:
        assert again.stream.ptr == stream.ptr
    assert stream_slots(arena) == slots + 1
    arena.stats()
    arena.check_invariants()
assert refused > 0
pin.close()
assert arena.stats().in_use == 0
arena.close()
"""


@NEEDS_OWN_MALLOC
def test_arena_stays_whole_where_the_host_has_no_memory_for_a_stream():
    child.run_quietly(WITHOUT_HOST_MEMORY)


# Each call for host memory fails in turn, of all that a program makes: what is refused changes
# nothing, and the same call then works.
REFUSED_ONCE = """
import sys
from faults.kinds import HeapCalls, start_with_heap_calls
start_with_heap_calls()
import gpumem
from arena.refused_host_memory import PROGRAMS

program = PROGRAMS[sys.argv[1]]
heap = HeapCalls()
program(lambda call, *arenas: call())       # imports, and what is made once
heap.watch()
due, refused, failed = 0, 0, True
while failed:           # until a program makes fewer calls than that
    due += 1
    def once_more(call, *arenas):
        global refused
        try:
            return call()
        except MemoryError:
            assert heap.failed() is not None, due
            refused += 1
            for arena in arenas:
                arena.check_invariants()
            return call()
    heap.arm(due, 0)
    try:
        program(once_more)
        failed = heap.failed() is not None
    finally:
        heap.disarm()
assert refused > 3, (due, refused)
"""


@NEEDS_OWN_MALLOC
@pytest.mark.parametrize("program", PROGRAMS)
def test_call_that_the_host_had_no_memory_for_changes_nothing_and_works_again(program):
    child.run_quietly(REFUSED_ONCE, program)

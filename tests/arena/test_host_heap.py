"""What arenas take of the host for themselves goes back with the arena, stream or thread."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import child

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
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "helpers.lives"],
        env={**os.environ, **EXACT, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    print(done.stdout)
    for line in done.stdout.splitlines():
        heap, mapped = map(float, line.split()[-2:])
        assert heap < LEAST, line
        assert mapped < PAGE, line
    assert line.startswith("stream and thread")


WITHOUT_HOST_MEMORY = """
import ctypes, gc, resource
import gpumem
from gpumem._testing.arenas import stream_slots

C = ctypes.CDLL(None)
C.malloc.restype = ctypes.c_void_p
C.malloc.argtypes = [ctypes.c_size_t]
C.free.argtypes = [ctypes.c_void_p]
PIECE = 2048
LIMITS = resource.getrlimit(resource.RLIMIT_AS)
pieces = (ctypes.c_void_p * 1_000_000)()

def leave(nbytes):
    '''Let malloc have about so many bytes in one piece, and no more.'''
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (mapped, LIMITS[1]))
    count = 0
    while piece := C.malloc(PIECE):
        pieces[count] = piece
        count += 1
    last = count
    for _ in range(-(-nbytes // PIECE)):
        last -= 1
        C.free(pieces[last])
    return last

arena = gpumem.Arena("host", {"backing": "regions"})
pin = arena.allocate(256)
streams = [gpumem.Stream("host") for _ in range(24)]
gc.collect()
gc.disable()
failed = []
for i in range(24):
    slots, stream = stream_slots(arena), streams[i]
    block = None
    left = leave(1024 * i)
    try:
        block = arena.allocate(1000, stream)
        block.close()
    except MemoryError:
        failed.append(i)
    resource.setrlimit(resource.RLIMIT_AS, LIMITS)
    for j in range(left):
        C.free(pieces[j])
    arena.check_invariants()
    assert stream_slots(arena) == slots + (block is not None), i
    with arena.allocate(1000, stream) as again:
        assert again.stream.ptr == stream.ptr
    assert stream_slots(arena) == slots + 1
    arena.stats()
    arena.check_invariants()
assert failed and len(failed) < 24, failed
pin.close()
assert arena.stats().in_use == 0
arena.close()
"""


def test_arena_stays_whole_where_the_host_has_no_memory_for_a_stream():
    child.run_quietly(WITHOUT_HOST_MEMORY, env=EXACT)

"""What arenas take of the host for themselves goes back with the arena, stream or thread."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LEAST = 16  # bytes: malloc's smallest piece takes more
PAGE = 4096

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2") or "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="this C library does not count what malloc has handed out",
)


def test_finished_lives_leave_nothing_on_the_heap_and_no_reserved_addresses():
    # One heap for all threads, without malloc's caches of each: what is counted is exact.
    env = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "helpers.lives"],
        env={**os.environ, **env, "PYTHONPATH": paths},
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

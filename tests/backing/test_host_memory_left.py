"""Pinned memory leaves memory to the rest of a host that has little available."""

from helpers import child, shared_object
from helpers.marks import NEEDS_OWN_MALLOC

MEMINFO = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

FILE *fopen64(const char *path, const char *mode) {
    FILE *(*real)(const char *, const char *) =
        (FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, "fopen64");
    return real(strcmp(path, "/proc/meminfo") ? path : getenv("MEMINFO"), mode);
}

FILE *fopen(const char *path, const char *mode) { return fopen64(path, mode); }
"""

HEAD = """
import os
from pathlib import Path
import pytest
import gpumem

MIB = 1 << 20


def have_available(nbytes):
    Path(os.environ["MEMINFO"]).write_text(f"MemAvailable: {nbytes >> 10} kB\\n")


have_available(1 << 40)
"""

SLEEP = """
arena = gpumem.Arena("host")
block = arena.allocate(600 * MIB)


def kept():
    arena.sleep()
    assert arena.stats().kept_for_sleep == 0
    arena.wake()
    return arena.stats().kept_for_sleep


assert kept() == 600 * MIB
have_available(200 * MIB)
assert kept() == 256 * MIB, "whole chunks of at most half of 800 MiB"
have_available(1 << 40)
assert kept() == 600 * MIB
arena.shrink()
assert arena.stats().kept_for_sleep == 0
"""

REFUSAL = """
arena = gpumem.Arena("host/pinned")
have_available(258 * MIB)
with pytest.raises(gpumem.OutOfMemoryError, match="host"):
    arena.allocate(3 * MIB)
assert arena.stats().reserved == 0
have_available(260 * MIB)
assert arena.allocate(3 * MIB).nbytes == 3 * MIB
"""


def run(script, folder):
    library = shared_object.build(folder, MEMINFO, "-ldl")
    child.run_quietly(
        HEAD + script, env={"LD_PRELOAD": library, "MEMINFO": str(folder / "meminfo")}
    )


@NEEDS_OWN_MALLOC
def test_memory_kept_for_the_next_sleep_is_no_more_than_is_left_besides(tmp_path):
    run(SLEEP, tmp_path)


@NEEDS_OWN_MALLOC
def test_pinned_memory_is_refused_where_less_than_256_mib_would_be_left(tmp_path):
    run(REFUSAL, tmp_path)

"""The functions of gpumem.h on several threads, called by C: Python's calls hardly overlap."""

import random
import shutil

import pytest
from helpers import child, shared_object

import gpumem

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not found")

# Allocates and frees at random; returns how many calls failed or blocks lost their first bytes.
PROGRAM = """\
#include <gpumem.h>

enum { SLOTS = 100 };

int work(gpumem_arena *arena, uint64_t seed, int steps) {
    static const size_t sizes[] = {300, 5000, 70000};
    uint64_t *blocks[SLOTS] = {0};
    int failures = 0;
    for (int i = 0; i < steps + SLOTS; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        int slot = i < steps ? (int)((seed >> 33) % SLOTS) : i - steps;
        if (blocks[slot] != NULL) {
            failures += *blocks[slot] != (uint64_t)(uintptr_t)blocks + (uint64_t)slot;
            failures += arena->calls->deallocate(arena, blocks[slot]) != GPUMEM_OK;
            blocks[slot] = NULL;
        } else if (i < steps) {
            void *block;
            size_t nbytes = sizes[(seed >> 40) % 3];
            failures += arena->calls->allocate(arena, nbytes, 0, NULL, &block) != GPUMEM_OK;
            if (block == NULL) continue;
            blocks[slot] = (uint64_t *)block;
            *blocks[slot] = (uint64_t)(uintptr_t)blocks + (uint64_t)slot;
        }
    }
    return failures;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c_threads")
    return shared_object.build(folder, PROGRAM, "-O1", f"-I{gpumem.get_include()}")


def test_threads_that_come_later_share_the_table_of_blocks_with_the_first(library):
    """In a process of its own, where no other thread has called the functions before."""
    seed = random.randrange(1 << 62)
    print("seed", seed)
    child.run_quietly(
        """
        import ctypes, sys, threading
        import gpumem, gpumem.integrations.c
        from gpumem.integrations.c._calls import address_of

        work = ctypes.CDLL(sys.argv[1]).work
        work.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
        arena = gpumem.Arena("host")
        capsule = gpumem.integrations.c.allocator(arena)

        def run(number, steps=200_000):
            failures[number] = work(address_of(capsule), int(sys.argv[2]) + number, steps)

        failures = {}
        run(0)      # alone: every part of the table is this thread's
        threads = [threading.Thread(target=run, args=[i]) for i in (1, 2)]
        for thread in threads:
            thread.start()
        run(3)
        for thread in threads:
            thread.join()
        assert failures == dict.fromkeys(range(4), 0), failures
        assert arena.stats().in_use == 0
        arena.check_invariants()
        """,
        library,
        str(seed),
    )

"""Run CuPy's own tests with gpumem beneath CuPy; they are read from a checkout of CuPy.

    python3 tests/gpu/cupy_tests.py CHECKOUT/tests [--own] [pytest's options]

``--own`` runs the same with CuPy's pool, for comparison. What is chosen allocates: arrays, copies
and views, creation, streams, graphs, and the allocators' tests that are not of the pool's insides.
Left out are those that test CuPy's pool itself (`MemoryPool`, `SingleDeviceMemoryPool`,
`MemoryAsyncPool`, the limit by ``CUPY_GPU_MEMORY_LIMIT``) and memory hooks, which it alone calls:
with gpumem nothing goes through them.
"""

import argparse
import os
import sys
from pathlib import Path

import pytest

CHOSEN = [
    "cupy_tests/cuda_tests/test_memory.py",
    "cupy_tests/cuda_tests/test_pinned_memory.py",
    "cupy_tests/cuda_tests/test_graph.py",
    "cupy_tests/cuda_tests/test_stream.py",
    "cupy_tests/core_tests/test_ndarray_copy_and_view.py",
    "cupy_tests/core_tests/test_ndarray_owndata.py",
    "cupy_tests/core_tests/test_ndarray_contiguity.py",
    "cupy_tests/core_tests/test_dlpack.py",
    "cupy_tests/core_tests/test_ndarray.py",
    "cupy_tests/creation_tests/test_from_data.py",
]
NOT_THE_POOLS = "not Pool and not Hook and not Limit and not MallocAsync"


class Beneath:
    """Keeps gpumem enabled for a run of pytest."""

    def pytest_configure(self, config):
        import gpumem
        import gpumem.integrations.cupy

        self.arena = gpumem.Arena("cuda:0")
        gpumem.integrations.cupy.enable(self.arena)

    def pytest_terminal_summary(self, terminalreporter):
        stats = self.arena.stats()
        self.arena.check_invariants()
        terminalreporter.write_line(
            f"gpumem served {stats.num_allocs} blocks, {stats.max_in_use >> 20} MiB at most"
        )


def devices() -> str:
    """Return pytest's expression that leaves out what needs a second GPU, where there is none."""
    import cupy

    return "not multi_gpu" if cupy.cuda.runtime.getDeviceCount() < 2 else ""


def main() -> int:
    """Run the chosen tests; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path)
    parser.add_argument("--own", action="store_true", help="CuPy's own pool")
    chosen, options = parser.parse_known_args()
    files = [str(chosen.tests / name) for name in CHOSEN if (chosen.tests / name).exists()]
    # CuPy's own configuration and marks, not ours.
    place = ["-c", os.devnull, f"--rootdir={chosen.tests}", "-W", "ignore"]
    arguments = [
        *files,
        *place,
        "-k",
        NOT_THE_POOLS,
        "-m",
        devices(),
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
    ]
    return int(pytest.main(arguments, plugins=[] if chosen.own else [Beneath()]))


if __name__ == "__main__":
    sys.exit(main())

"""Run PyTorch's own tests with gpumem in place of its allocator; they are read from its sources.

    python3 tests/gpu/torch_tests.py SOURCES/test/test_cuda.py [--own] [pytest's options]

``--own`` runs the same with PyTorch's allocator, for comparison: the tests may be of another
version than the PyTorch that is installed, and then some fail with either. What is chosen allocates
or frees: tensors, streams, record_stream, graphs, limits, errors, optimisers, autocast. What is
left out is in NOT_OURS, with the reason.
"""

import argparse
import os
import sys
from pathlib import Path

import pytest

NOT_OURS = {
    # Pinned host memory is another allocator's, which is not replaced.
    "pinned": "PyTorch's host allocator",
    "cudart_register": "PyTorch's host allocator",
    # PyTorch refuses under any pluggable allocator.
    "snapshot": "memory history",
    "memory_plots": "memory history",
    "memory_profiler": "memory history",
    "direct_traceback": "memory history",
    "test_cycles": "memory history",
    "cpp_memory": "memory history",
    "notifies_oom": "observers of exhaustion",
    "TestBlockStateAbsorption": "checkpoints of the caching allocator's pools",
    "MemPool": "pools of the caching allocator",
    "mempool": "pools of the caching allocator",
    "max_split_expandable": "settings of the caching allocator",
    "garbage_collect_expandable": "settings of the caching allocator",
    "allocator_settings": "settings of the caching allocator",
    "allocator_fuzz": "settings of the caching allocator",
    "memory_stats_of_multiple_generators": "counts segments of the caching allocator's pools",
    "graph_memory_stats_and_use_result": "counts segments of the caching allocator's pools",
    "graph_two_successive": "counts segments of the caching allocator's pools",
    "allocator_propagates_stream": "counts segments of the caching allocator's pools",
    "cachingAllocator_raw_alloc": "settings of the caching allocator",
    "TestGDS": "GPUDirect storage",
    "gds": "GPUDirect storage",
    # These ask no allocator anything.
    "nvml": "the driver's management library",
    "temperature": "the driver's management library",
    "power_draw": "the driver's management library",
    "clock_speed": "the driver's management library",
    "amdsmi": "the driver's management library",
    "device_memory_used": "the driver's management library",
}


# The same for whole names, of which others are the beginning.
NOT_OURS_EXACTLY = {
    "TestCuda::test_record_stream": "expects the address that the caching allocator would give",
}


class Exactly:
    """Leaves out what NOT_OURS_EXACTLY names: pytest's own options take the beginning of a name."""

    def pytest_collection_modifyitems(self, config, items):
        out = [item for item in items if item.nodeid.partition("::")[2] in NOT_OURS_EXACTLY]
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)


class InPlace:
    """Puts gpumem in place of PyTorch's allocator for a run of pytest."""

    def pytest_configure(self, config):
        import gpumem
        from gpumem.integrations import torch

        self.arena = gpumem.Arena("cuda:0")
        torch.enable(self.arena, mode="full")

    def pytest_terminal_summary(self, terminalreporter):
        stats = self.arena.stats()
        self.arena.check_invariants()
        terminalreporter.write_line(
            f"gpumem served {stats.num_allocs} blocks, {stats.max_in_use >> 20} MiB at most"
        )


def main() -> int:
    """Run the chosen tests; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="test_cuda.py")
    parser.add_argument("--own", action="store_true", help="PyTorch's own allocator")
    chosen, options = parser.parse_known_args()
    arguments = [
        str(chosen.tests),
        # PyTorch's own configuration and marks, not ours.
        *("-c", os.devnull, f"--rootdir={chosen.tests.parent}", "-W", "ignore"),
        *("-k", " and ".join(f"not {name}" for name in NOT_OURS)),
        *("-q", "-p", "no:cacheprovider"),
        *options,
    ]
    plugins = [Exactly()] if chosen.own else [Exactly(), InPlace()]
    return int(pytest.main(arguments, plugins=plugins))


if __name__ == "__main__":
    sys.exit(main())

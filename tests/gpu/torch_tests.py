"""Run PyTorch's own tests over its allocator and over gpumem, and name what only the first passes.

    python3 tests/gpu/torch_tests.py SOURCES/test/test_cuda.py [FILE ...] [--OPTION=VALUE of pytest]

PyTorch installs no tests: they come from its sources, at the commit of the installed version or at
the tag of its release, in a folder beside this tree. The whole folder `test` is needed, whose
files import one another:

    git clone --filter=blob:none --no-checkout https://github.com/pytorch/pytorch SOURCES
    cd SOURCES
    git sparse-checkout set test
    git checkout $(python3 -c "import torch; print(torch.version.git_version)")     # or v2.11.0

The files: test/test_cuda.py, test/inductor/test_cudagraph_trees.py, test/test_multiprocessing.py.
What fails with either allocator counts for neither. Processes that a test starts have PyTorch's
allocator, but for files of WITH_CHILDREN. Of test_multiprocessing.py only the tests with "cuda" in
their name run. `--seconds` gives each run an equal part of a time; what has not run by then counts
for neither. A table of all files comes last. Exit code 1: something passes with PyTorch's only.

As a plugin of pytest (``-p gpu.torch_tests``) this module puts gpumem in place of the allocator.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
# Expressions of pytest's -k, and why what they choose cannot pass over another allocator.
LEFT_OUT = {
    "test_allocator_settings": "sizes rounded to powers of two, as a setting says",
    "test_host_memory_stats": "sizes of pinned memory rounded to powers of two",
    "graph_capture_reclaim": "a setting: a capture reuses what its joined streams have freed",
    "test_mempool_with_allocator or test_nested_mempool": "counts segments of 2 MiB and 20 MiB",
    "test_allocate_in_thread_to_pool": "counts segments of 2 MiB and 20 MiB",
    "memory_stats_of_multiple_generators": "counts segments of 2 MiB and 20 MiB",
    "graph_memory_stats_and_use_result or test_graph_two_successive": "counts such segments too",
    "test_record_stream and not shifted_view": "expects the address that was freed last",
}
# Files whose tests start processes that must have gpumem too, and which of their tests run.
WITH_CHILDREN = {"test_multiprocessing.py": "cuda"}
PASSED = "PASSED"
ENDED = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
ENDINGS = (0, 1, 5)  # of pytest: all passed, some failed, none were chosen


# ---- the plugin ----------------------------------------------------------------------------------


def pytest_configure(config):
    from gpumem.integrations import torch

    if torch.status().mode is None:
        torch.enable(mode="full")


def pytest_terminal_summary(terminalreporter):
    import gpumem

    arena = gpumem.get_default_resource("cuda:0")
    arena.check_invariants()
    stats = arena.stats()
    terminalreporter.write_line(
        f"gpumem served {stats.num_allocs} blocks, {stats.max_in_use >> 20} MiB at most"
    )


# ---- the command ---------------------------------------------------------------------------------


class Run(NamedTuple):
    """What a run of a file came to."""

    outcomes: dict[str, str]
    """How each test ended, by its name."""
    is_whole: bool
    """False: it ran out of time, so that a test which is missing says nothing."""
    lines: list[str]


def command(tests, over_gpumem, options):
    """Return the command that runs a file, with PyTorch's own configuration left out."""
    chosen = [f"not ({each})" for each in LEFT_OUT]
    if tests.name in WITH_CHILDREN:
        chosen.append(WITH_CHILDREN[tests.name])
    pytest = [
        *("-m", "pytest", str(tests), "-k", " and ".join(chosen), "-v", "--color=no"),
        *("-c", os.devnull, f"--rootdir={tests.parent}", "-W", "ignore", "-p", "no:cacheprovider"),
        *options,
    ]
    if not over_gpumem:
        return [sys.executable, *pytest]
    plugin = ["-p", "gpu.torch_tests"]
    if tests.name in WITH_CHILDREN:
        return [sys.executable, "-m", "gpumem", "run", *pytest, *plugin]
    return [sys.executable, *pytest, *plugin]


def outcomes(lines):
    """Return how each test ended, from what pytest prints as it goes: a crash leaves the others."""
    found = {}
    for line in lines:
        if ended := ENDED.match(line):
            name, how = ended.groups()
            # A second line of a test is of its end: what fails there did not pass.
            found[name] = how if found.get(name, PASSED) == PASSED else found[name]
    return found


def run(tests, over_gpumem, seconds, options):
    """Run a file for at most so many seconds (None: to its end)."""
    path = os.pathsep.join(
        filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")])
    )
    process = subprocess.Popen(
        command(tests, over_gpumem, options),
        cwd=tests.parent,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    is_whole = True
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        is_whole = False
    lines = said.splitlines()
    if is_whole and process.returncode not in ENDINGS:
        lines.append(f"{tests.name}: the run ended with {process.returncode}")
    return Run(outcomes(lines), is_whole, lines)


def main() -> int:
    """Run every file twice and print the differences; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, nargs="+", help="test_cuda.py and others")
    parser.add_argument("--seconds", type=float, help="for all runs together, in equal parts")
    chosen, options = parser.parse_known_args()
    end = None if chosen.seconds is None else time.monotonic() + chosen.seconds
    left = 2 * len(chosen.tests)
    table = [f"{'file':<28}{'tests':>7}{'native':>8}{'gpumem':>8}{'lost':>6}{'gained':>8}  ended"]
    lost = 0
    for tests in (each.resolve() for each in chosen.tests):
        runs = []
        for over_gpumem in (False, True):
            seconds = None if end is None else max(1.0, (end - time.monotonic()) / left)
            runs.append(run(tests, over_gpumem, seconds, options))
            left -= 1
        own, ours = runs
        passed = {name for name, how in own.outcomes.items() if how == PASSED}
        if not ours.is_whole:
            passed &= ours.outcomes.keys()
        missing = sorted(name for name in passed if ours.outcomes.get(name) != PASSED)
        also = sum(
            how == PASSED and name in own.outcomes and name not in passed
            for name, how in ours.outcomes.items()
        )
        if missing or not own.outcomes:
            print("\n".join((ours.lines if own.outcomes else own.lines)[-200:]))
        print("\n".join(f"  {name}: {ours.outcomes.get(name, 'did not run')}" for name in missing))
        how = "whole" if own.is_whole and ours.is_whole else "out of time"
        table.append(
            f"{tests.name:<28}{len(own.outcomes):>7}{len(passed):>8}"
            f"{len(passed) - len(missing):>8}{len(missing):>6}{also:>8}  {how}"
        )
        lost += len(missing)
    print("\n".join(table))
    return int(lost != 0)


if __name__ == "__main__":
    sys.exit(main())

"""Run PyTorch's own tests over its allocator and over gpumem, and name what only the first passes.

    python3 tests/gpu/torch_tests.py SOURCES/test/test_cuda.py [FILE ...] [--OPTION=VALUE of pytest]

The files are of the sources of the PyTorch that is installed (``torch.version.git_version``). What
fails with either allocator counts for neither. Processes that a test starts have PyTorch's
allocator, but for files of WITH_CHILDREN. Exit code 1: something passes with PyTorch's only.

As a plugin of pytest (``-p gpu.torch_tests``) this module puts gpumem in place of the allocator.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parents[1]
# Expressions of pytest's -k, and why what they choose cannot pass over another allocator.
LEFT_OUT = {
    "test_allocator_settings": "sizes rounded to powers of two, as a setting says",
    "graph_capture_reclaim": "a setting: a capture reuses what its joined streams have freed",
    "test_mempool_with_allocator or test_nested_mempool": "counts segments of 2 MiB and 20 MiB",
    "test_allocate_in_thread_to_pool": "counts segments of 2 MiB and 20 MiB",
    "memory_stats_of_multiple_generators": "counts segments of 2 MiB and 20 MiB",
    "graph_memory_stats_and_use_result": "counts segments of 2 MiB and 20 MiB",
    "test_graph_two_successive": "counts segments of 2 MiB and 20 MiB",
    "test_record_stream and not shifted_view": "expects the address that was freed last",
}
WITH_CHILDREN = ("test_multiprocessing.py",)
PASSED = "passed"


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


def command(tests, over_gpumem, report, options):
    """Return the command that runs a file, with PyTorch's own configuration left out."""
    chosen = " and ".join(f"not ({each})" for each in LEFT_OUT)
    pytest = [
        *("-m", "pytest", str(tests), "-k", chosen, f"--junitxml={report}", "-q"),
        *("-c", os.devnull, f"--rootdir={tests.parent}", "-W", "ignore", "-p", "no:cacheprovider"),
        *options,
    ]
    if not over_gpumem:
        return [sys.executable, *pytest]
    plugin = ["-p", "gpu.torch_tests"]
    if tests.name in WITH_CHILDREN:
        return [sys.executable, "-m", "gpumem", "run", *pytest, *plugin]
    return [sys.executable, *pytest, *plugin]


def outcomes(report):
    """Return how each test of a report ended, by its name."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ended = {each.tag for each in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = min(ended, default=PASSED)
    return found


def run(tests, over_gpumem, folder, options):
    """Run a file; return its outcomes, and the last lines that it printed."""
    report = Path(folder) / f"{tests.stem}-{over_gpumem}.xml"
    path = os.pathsep.join(
        filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        command(tests, over_gpumem, report, options),
        cwd=tests.parent,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = done.stdout.splitlines()
    if not report.exists():
        raise SystemExit(
            "\n".join([*lines[-40:], f"{tests}: the run ended with {done.returncode}"])
        )
    return outcomes(report), lines


def main() -> int:
    """Run every file twice and print the differences; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, nargs="+", help="test_cuda.py and others")
    chosen, options = parser.parse_known_args()
    lost = []
    with tempfile.TemporaryDirectory() as folder:
        for tests in (each.resolve() for each in chosen.tests):
            own, _ = run(tests, False, folder, options)
            ours, lines = run(tests, True, folder, options)
            passed = {name for name, how in own.items() if how == PASSED}
            missing = sorted(name for name in passed if ours.get(name) != PASSED)
            also = sum(how == PASSED and name not in passed for name, how in ours.items())
            print(
                f"{tests.name}: {len(own)} tests, {len(passed)} pass over PyTorch's allocator, "
                f"{len(passed) - len(missing)} of them over gpumem, {also} over gpumem only"
            )
            print("\n".join(f"  {name}: {ours.get(name, 'did not run')}" for name in missing))
            if missing:
                print("\n".join(lines[-200:]))
            lost += missing
    print(f"{len(lost)} pass over PyTorch's allocator only")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())

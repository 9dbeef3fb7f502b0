"""Run the flakiest quarter of the test files many times under load; prints its seed.

Status 1: a test failed. Files that are named are run instead of the quarter.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import sys
import time
from pathlib import Path

from . import choice
from .runs import ROOT, Outcome, Repetition, busy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="what to run")
    parser.add_argument("--times", type=int, default=200, help="runs of each file")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the most, in all")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="files at a time; cores")
    parser.add_argument("--load", type=int, metavar="N", help="busy processes; half the workers")
    parser.add_argument("--patience", type=float, default=300, help="seconds for one file")
    parser.add_argument("--seed", type=int, help="of the order of the files")
    parser.add_argument("--list", action="store_true", help="only print the files")
    chosen = parser.parse_args()
    files = [path.resolve() for path in chosen.files] or list(choice.quarter())
    if missing := [path for path in files if not path.is_file()]:
        parser.error(f"no such file: {missing[0]}")
    if chosen.list:
        _list()
        return 0
    for name in ("pytest", "hypothesis"):
        if importlib.util.find_spec(name) is None:
            parser.error(f"needs {name}: pip install -e '.[test]'")
    load = max(1, chosen.workers // 2) if chosen.load is None else chosen.load
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}, {len(files)} files, {chosen.workers} at a time, {load} busy processes")
    begun = time.monotonic()
    repetition = Repetition(
        files,
        times=chosen.times,
        seconds=60 * chosen.minutes,
        patience_s=chosen.patience,
        seed=seed,
        tell=lambda line: print(line, flush=True),
    )
    with busy(load):
        outcome = repetition.run(chosen.workers)
    _report(outcome, time.monotonic() - begun)
    return 1 if outcome.failed else 0


def _list() -> None:
    print(f"tests that depend on timing, in {len(choice.candidates())} files:")
    for path, count in choice.quarter().items():
        print(f"{count:4} {path.relative_to(ROOT)}")


def _report(outcome: Outcome, seconds: float) -> None:
    if outcome.failed:
        print("\nfailed  test")
        for test, failures in sorted(outcome.failed.items(), key=lambda item: -item[1].count):
            print(f"{failures.count:6}  {test}")
        for test, failures in outcome.failed.items():
            print(f"\n---- {test}: the first failure\n{failures.first}")
    least, most = min(outcome.runs.values()), max(outcome.runs.values())
    tests = ", ".join(f"{count:,} tests {what}" for what, count in sorted(outcome.tests.items()))
    print(f"\n{outcome.runs.total()} runs of files in {seconds:.0f} s, {tests or 'no test'}")
    if outcome.given_up:
        print(f"{outcome.given_up} runs given up at the end of the time")
    reached = f"{least}" if least == most else f"{least} to {most}"
    failed = sum(failures.count for failures in outcome.failed.values())
    print(f"{reached} repetitions of each file, {failed} failures")


if __name__ == "__main__":
    sys.exit(main())

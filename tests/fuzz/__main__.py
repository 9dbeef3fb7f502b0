"""Try mutated inputs on readers, for a time each; prints its seed. Status 1: something failed."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

import gpumem

from . import targets
from .engine import ROOT, Search


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(targets.NAMES))
    parser.add_argument("--seconds", type=float, default=60, help="for each; 0 tries the corpus")
    parser.add_argument("--seed", type=int, help="repeats the mutations until the first crash")
    parser.add_argument("--hang-seconds", type=float, default=10, help="of the processor's time")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="of findings")
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - {*targets.NAMES, targets.PLANTED}:
        parser.error(f"unknown target {min(unknown)!r}: expected {', '.join(targets.NAMES)}")
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}, gpumem {gpumem.__version__}", flush=True)
    failed = 0
    for name in chosen.targets or targets.NAMES:
        folder = chosen.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        result = Search(name, seed, folder, chosen.hang_seconds).run(chosen.seconds)
        print(result, flush=True)
        for path, told in result.findings.items():
            print(f"{path}\n    {told.strip().replace(chr(10), chr(10) + '    ')}", flush=True)
        failed += len(result.findings)
    print(f"{failed} findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

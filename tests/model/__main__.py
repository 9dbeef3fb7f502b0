"""Run random programs against the model until the time is over; prints its seed.

Status 1: a program behaved otherwise than the model; the shortest one that does is printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback

import gpumem

from . import diary
from .machine import search


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1, help="about how long")
    parser.add_argument("--seed", type=int, help="repeats the programs")
    parser.add_argument("--steps", type=int, default=60, help="rules of one program, at most")
    parser.add_argument(
        "--first", action="store_true", help="show what fails first; do not look for less"
    )
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}, gpumem {gpumem.__version__}", flush=True)
    try:
        programs = search(seed, 60 * chosen.minutes, chosen.steps, shorten=not chosen.first)
    except Exception as error:
        traceback.print_exc()
        print("The shortest program that failed, step by step:", *diary.failed, sep="\n")
        print(diary.failure)
        print(f"--seed {seed}, after {diary.programs} programs: {type(error).__name__}: {error}")
        return 1
    print(f"{programs:,} programs of up to {chosen.steps} steps, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())

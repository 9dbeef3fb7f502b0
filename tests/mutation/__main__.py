"""Try mutants of the allocator's core; print those that no test noticed, and a table."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

# Before the workers are forked: each build needs them.
import Cython.Build  # noqa: F401
import setuptools.command.build_ext  # noqa: F401

from . import equivalent
from .campaign import KILLED, BaselineError, Campaign, Outcome, in_turn
from .mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    "gpumem/_native/bfc/table.pyx",
    "gpumem/_native/bfc/table.pxd",
    "gpumem/_native/bfc/holes.pyx",
    "gpumem/_native/arena/thread_cache.pyx",
    "gpumem/_native/arena/thread_cache.pxd",
    "gpumem/_native/arena/streams.pyx",
    "gpumem/_native/arena/streams.pxd",
    "gpumem/_native/arena/fast_path.pyx",
    "gpumem/_native/arena/slow_path.pyx",
    "gpumem/_native/arena/growth.pyx",
    "gpumem/_native/arena/release.pyx",
    "gpumem/_native/arena/release.pxd",
    "gpumem/_native/arena/bookkeeping.pyx",
    "gpumem/_native/arena/bookkeeping.pxd",
    "gpumem/_native/arena/types.pxd",
    "gpumem/_native/pages/plan.pyx",
    "gpumem/_native/pages/execute.pyx",
    "gpumem/_native/pages/space.pyx",
    "gpumem/_native/pages/types.pxd",
    "gpumem/_native/budget/tree.pyx",
    "gpumem/_native/budget/tree.pxd",
    "gpumem/_budget.pyx",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="*", help="PATH or PATH:LINE; all of the core: none")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with its tree")
    parser.add_argument("--minutes", type=float, default=60, help="about how long, in all")
    parser.add_argument("--sample", type=int, help="try so many at most, of every file its share")
    parser.add_argument("--seed", type=int, help="which come first")
    parser.add_argument("--out", type=Path, help="file for results, a line of JSON each")
    parser.add_argument("--keep", type=Path, help="folder for the built tree, kept for later runs")
    parser.add_argument("--least", type=float, default=85, help="percent that have to be noticed")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    chosen = parser.parse_args()
    until = time.monotonic() + 60 * chosen.minutes
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    made = [mutant for file in chosen.files or CORE for mutant in _wanted(file)]
    without_effect = equivalent.listed()
    tried = [one for one in made if equivalent.key_of(one) not in without_effect]
    tried = in_turn(tried, seed)[: chosen.sample]
    print(f"{len(made)} mutants, {len(tried)} to try", flush=True)
    if chosen.list:
        for one in tried:
            print(f"{one}: {one.operator}\n    - {one.before}\n    + {one.after}")
        return 0
    try:
        with _folder(chosen.keep) as folder:
            results = _tried(tried, folder, chosen.workers, until, chosen.out)
    except BaselineError as error:
        print(error)
        return 2
    print(_table(made, tried, results))
    share, _ = _share(_of_the_sample(tried, results))
    return 0 if share >= chosen.least else 1


def _wanted(file: str) -> list[Mutant]:
    path, _, line = file.partition(":")
    return [one for one in mutants_of(ROOT, path) if not line or one.line == int(line)]


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _tried(
    mutants: Sequence[Mutant], folder: Path, workers: int, until: float, out: Path | None
) -> list[tuple[Mutant, Outcome]]:
    results: list[tuple[Mutant, Outcome]] = []
    begun = time.monotonic()
    campaign = Campaign(ROOT, folder, workers, until)
    print(f"{time.monotonic() - begun:.0f} s: built", flush=True)
    try:
        left_out = campaign.measure()
        print(
            f"{time.monotonic() - begun:.0f} s: tests pass without a mutant, and all of them take "
            f"{campaign.seconds_of_all():.0f} s",
            flush=True,
        )
        print("".join(f"left out, slow or not reliable: {test}\n" for test in left_out), end="")
        with open(out or os.devnull, "w") as lines:
            for mutant, outcome in campaign.run(mutants):
                results.append((mutant, outcome))
                lines.write(_json(mutant, outcome) + "\n")
                lines.flush()
                if outcome.verdict == "survived":
                    print(_survivor(mutant), flush=True)
                if len(results) % 25 == 0:
                    share, error = _share(Counter(ended.verdict for _, ended in results))
                    print(
                        f"{time.monotonic() - begun:.0f} s: {len(results)} tried, "
                        f"{share:.1f} ± {error:.1f} % noticed",
                        flush=True,
                    )
    finally:
        campaign.close()
    return results


def _json(mutant: Mutant, outcome: Outcome) -> str:
    return json.dumps(
        {
            "file": mutant.file,
            "function": mutant.function,
            "line": mutant.line,
            "operator": mutant.operator,
            "before": mutant.before,
            "after": mutant.after,
            "verdict": outcome.verdict,
            "test": outcome.test,
            "seconds": round(outcome.seconds, 1),
        }
    )


def _survivor(mutant: Mutant) -> str:
    return f"survived: {mutant}\n    - {mutant.before}\n    + {mutant.after}"


# ---- the table -----------------------------------------------------------------------------------


def _share(verdicts: Counter[str]) -> tuple[float, float]:
    """Return how many percent were noticed, and the error of that at 95 % if they are a sample."""
    killed = sum(verdicts[kind] for kind in KILLED)
    count = killed + verdicts["survived"]
    share = killed / count if count else 0.0
    return 100 * share, 196 * math.sqrt(share * (1 - share) / count) if count else 0.0


def _of_the_sample(
    tried: Sequence[Mutant], results: Sequence[tuple[Mutant, Outcome]]
) -> Counter[str]:
    """Return the verdicts of the mutants before the first, in their order, that was not judged.

    What is noticed ends sooner than what survives, so that those behind it are no fair sample.
    """
    judged = {mutant: ended.verdict for mutant, ended in results if ended.verdict != "unfinished"}
    return Counter(judged[mutant] for mutant in itertools.takewhile(judged.__contains__, tried))


def _table(
    made: Sequence[Mutant], tried: Sequence[Mutant], results: Sequence[tuple[Mutant, Outcome]]
) -> str:
    columns = (*KILLED, "survived", "no effect", "uncompilable", "unfinished")
    lines = [f"{'':40}{'made':>6}{''.join(f'{name:>13}' for name in columns)}{'noticed':>10}"]
    files = dict.fromkeys(mutant.file for mutant in made)
    for file in [*files, "all"]:
        count = sum(file in (one.file, "all") for one in made)
        verdicts = Counter(
            outcome.verdict for mutant, outcome in results if file in (mutant.file, "all")
        )
        cells = "".join(f"{verdicts[name]:>13}" for name in columns)
        share = f"{_share(verdicts)[0]:.1f} %" if sum(verdicts.values()) else "-"
        lines.append(f"{file.removeprefix('gpumem/'):40}{count:>6}{cells}{share:>10}")
    sample = _of_the_sample(tried, results)
    share, error = _share(sample)
    survivors = sorted(
        (mutant for mutant, outcome in results if outcome.verdict == "survived"),
        key=lambda mutant: (mutant.file, mutant.start),
    )
    return "\n".join(
        [
            "",
            *map(_survivor, survivors),
            "",
            *lines,
            "",
            f"{len(results)} of {len(made)} mutants tried, {len(made) - len(tried)} left out or "
            f"listed as without effect",
            f"of the first {sum(sample.values())}: {share:.1f} ± {error:.1f} % noticed",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

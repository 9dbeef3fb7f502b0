"""Let every call of every scenario fail once with every error; prints its seed."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import sys
import time
import warnings
from collections.abc import Iterable
from itertools import count

import gpumem
from gpumem.errors import PoolFallbackWarning

from .kinds import KINDS, start_with_heap_calls
from .scenarios import SCENARIOS
from .search import search

PATIENCE_S = 300  # of one scenario with one call: then it hangs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, help="only this one")
    parser.add_argument("--seed", type=int, help="of the sizes in the scenarios")
    parser.add_argument("--kind", choices=KINDS, default="driver", help="of the calls that fail")
    parser.add_argument("--error", help="only this one of the kind's")
    parser.add_argument("--call", type=int, help="only this call")
    parser.add_argument("--sample", type=int, help="so many calls of each, by the seed")
    parser.add_argument("--once", action="store_true", help="one error at each call, in turn")
    parser.add_argument("--verbose", action="store_true", help="tell each run before it begins")
    chosen = parser.parse_args()
    if chosen.kind == "heap":
        start_with_heap_calls()
    kind = KINDS[chosen.kind]()
    if chosen.error not in (None, *kind.errors):
        parser.error(f"--error: {chosen.error!r} is none of {', '.join(kind.errors)}")
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}, gpumem {gpumem.__version__}", flush=True)
    warnings.simplefilter("ignore", PoolFallbackWarning)
    gc.collect()
    gc.freeze()  # each run is followed by a collection
    errors = [kind.errors[chosen.error]] if chosen.error else list(kind.errors.values())

    def errors_of(call: int) -> Iterable[int]:
        return [errors[(seed + call) % len(errors)]] if chosen.once else errors

    def choose(total: int) -> Iterable[int]:
        if chosen.call:
            return [chosen.call]
        if chosen.sample and chosen.sample < total:
            return sorted(random.Random(seed).sample(range(1, total + 1), chosen.sample))
        return count(1)

    def tell(text: str) -> None:
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        if chosen.verbose:
            print(f"  {text}", flush=True)

    failed = runs = 0
    for name, scenario in SCENARIOS.items():
        if chosen.scenario not in (None, name):
            continue
        print(f"{name}: ", end="", flush=True)
        start = time.monotonic()
        outcome = search(scenario, seed, errors_of, choose, tell, kind)
        raised = sum(count for (_, error), count in outcome.seen.items() if error)
        took = time.monotonic() - start
        print(
            f"{outcome.calls} {kind.name} calls, {outcome.runs} runs, {raised} raised, "
            f"{outcome.seen.total() - raised} absorbed, {took:.0f} s",
            flush=True,
        )
        for problem in outcome.problems:
            print(f"  {problem}", flush=True)
        failed += len(outcome.problems)
        runs += outcome.runs
    faulthandler.cancel_dump_traceback_later()
    print(f"{runs} runs, {failed} problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""How long a CUDA tensor takes to another process, over PyTorch's allocator and over gpumem."""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack

from bench import markdown
from bench.children import Child, ask_in_turn
from bench.harness import ratios_within_rounds

CONFIGURATIONS = ("native", "full")
SIZES = {"64 KiB": 1 << 16, "32 MiB": 1 << 25, "256 MiB": 1 << 28}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torch_shares", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=8, help="of each size in a round")
    chosen = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        children = [stack.enter_context(Child(name, chosen.device)) for name in CONFIGURATIONS]
        for size, nbytes in SIZES.items():
            request = {"do": "share", "nbytes": nbytes, "count": chosen.tensors}
            rounds = [ask_in_turn(children, request) for _ in range(chosen.rounds)]
            for answers in rounds:
                for name, said in answers.items():
                    if "error" in said:
                        raise SystemExit(f"{name}: {said['error']}")
            for which in ("new", "again"):
                samples = {
                    name: [statistics.median(answers[name][which]) for answers in rounds]
                    for name in CONFIGURATIONS
                }
                ratios = ratios_within_rounds(samples, "native")
                for name, seconds in samples.items():
                    spent = f"{statistics.median(seconds) * 1e6:.0f}"
                    rows.append([size, which, name, spent, f"{ratios[name]:.3f}"])
    print(markdown.table(["tensor", "passed", "allocator", "us", "/ native"], rows))


if __name__ == "__main__":
    main()

"""`Arena.copy_out` beside a training step: its rate, its memory, and the time of the steps.

    python -m bench.copy_out [--gib 32] [--rounds 5] [--limit 1GiB] [--file PATH]

Tensors of 512 MiB are copied to memory of the CPU that an earlier copy has filled, or to a file,
while steps of bf16 matrix products read the same tensors. "bus" is a copy of as many bytes from
the GPU into one pinned GiB, alone. Steps are timed by the host from one synchronization to the
next; a round has steps without a copy, then as many as fit beside one. Medians of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gpumem
from bench import markdown
from bench.sleep import GIB, MIB, plain_copies, seconds
from gpumem._support.sizes import parse_size

WIDTH = 16384  # of the matrices: 512 MiB in bf16
ROWS = 4096  # of the activations
STEP = 8  # matrices that a step reads


def peak_of_host_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    with open("/proc/self/status") as lines:
        found = next(line for line in lines if line.startswith("VmHWM:"))
    return int(found.split()[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.copy_out", description=__doc__)
    parser.add_argument("--gib", type=float, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", default="256MiB")
    parser.add_argument("--file", help="copy to this file instead")
    given = parser.parse_args()
    import torch

    from gpumem.integrations import torch as integration

    arena = gpumem.Arena("cuda:0")
    integration.enable(arena, pinned=False)
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda:0"}
    weights = {
        f"weights.{number}": torch.full((WIDTH, WIDTH), 1 / WIDTH, **kinds)
        for number in range(int(given.gib * GIB) // (WIDTH * WIDTH * 2))
    }
    nbytes = sum(each.nbytes for each in weights.values())
    bits = {name: each.view(torch.int16) for name, each in weights.items()}
    inputs = torch.ones(ROWS, WIDTH, **kinds)
    matrices = list(weights.values())[:STEP]

    def step() -> None:
        outputs = inputs
        for matrix in matrices:
            outputs = outputs @ matrix
        torch.cuda.synchronize()

    copy_plainly, _ = plain_copies("cuda:0", nbytes)
    for _ in range(5):
        step()
    copy_plainly()
    place: Any = given.file or arena.copy_out(bits, limit=given.limit).wait()
    before = peak_of_host_memory()
    found: dict[str, list[float]] = {"bus": [], "alone": [], "beside steps": []}
    ratios = []
    for _ in range(given.rounds):
        found["bus"].append(seconds(copy_plainly))
        found["alone"].append(seconds(arena.copy_out(bits, to=place, limit=given.limit).wait))
        bare = [seconds(step) for _ in range(20)]
        begin = time.perf_counter()
        copying = arena.copy_out(bits, to=place, limit=given.limit)
        beside = []
        while not copying.done:
            beside.append(seconds(step))
        copying.wait()
        found["beside steps"].append(time.perf_counter() - begin)
        ratios.append(statistics.median(beside) / statistics.median(bare))
    growth = peak_of_host_memory() - before
    assert growth <= parse_size(given.limit), f"{growth} bytes beside the destination"
    bus = statistics.median(found["bus"])
    rows = [
        [
            name,
            f"{nbytes / statistics.median(each) / 1e9:.1f}",
            f"{bus / statistics.median(each):.2f}",
        ]
        for name, each in found.items()
    ]
    print(markdown.table(("copy", "GB/s", "/ bus"), rows))
    print(f"\nstep beside the copy / without: {statistics.median(ratios):.3f}")
    print(f"limit {given.limit}; the process grew by {growth / MIB:.1f} MiB meanwhile")
    if not given.file:
        assert all(bool((place[name] == place[name].flat[0]).all()) for name in list(place)[::16])


if __name__ == "__main__":
    main()

"""`Arena.copy_out` beside a training step: its rate, its memory, and the time of the steps.

    python -m bench.copy_out [--gib 32] [--rounds 5] [--limit 1GiB] [--to host PATH]

Tensors of 512 MiB are copied to memory of the CPU that an earlier copy has filled, or to a file,
while steps of bf16 matrix products read the same tensors. `--limit` is that of "host" and of a
file. "bus" is a copy of as many bytes from the GPU into one pinned GiB, alone, "PyTorch" its own
copies to the arrays of "host". Steps are timed by the host from one synchronization to the next; a
round has steps without a copy, then as many as fit beside one. Medians of rounds.
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
    parser.add_argument("--to", nargs="+", default=["host"])
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
    places: dict[str, Any] = {
        to: arena.copy_out(bits, to, limit=given.limit).wait() for to in given.to
    }
    plain = {name: torch.from_numpy(array) for name, array in dict(places.get("host", {})).items()}
    before = peak_of_host_memory()
    found: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}

    def copy_by_torch() -> None:
        for name, array in plain.items():
            array.copy_(bits[name])

    for _ in range(given.rounds):
        found.setdefault("bus", []).append(seconds(copy_plainly))
        if plain:
            found.setdefault("PyTorch", []).append(seconds(copy_by_torch))
        for to, place in places.items():
            begin = time.perf_counter()
            arena.copy_out(bits, place, limit=given.limit).wait()
            found.setdefault(f"{to}, alone", []).append(time.perf_counter() - begin)
            bare = [seconds(step) for _ in range(20)]
            begin = time.perf_counter()
            copying = arena.copy_out(bits, place, limit=given.limit)
            beside = []
            while not beside or not copying.done:
                beside.append(seconds(step))
            copying.wait()
            found.setdefault(f"{to}, beside steps", []).append(time.perf_counter() - begin)
            ratio = statistics.median(beside) / statistics.median(bare)
            ratios.setdefault(to, []).append(ratio)
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
    for to, each in ratios.items():
        print(f"\n{to}: step beside the copy / without: {statistics.median(each):.3f}")
    print(f"limit {given.limit}; the process grew by {growth / MIB:.1f} MiB meanwhile")
    wanted = next(iter(bits.values()))[0, 0].item()
    for place in places.values():
        if isinstance(place, dict):
            assert all(bool((place[name] == wanted).all()) for name in list(place)[::16])


if __name__ == "__main__":
    main()

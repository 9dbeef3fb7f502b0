"""PyTorch's pinned memory, of its own allocator and of gpumem's arena.

    python -m bench.torch_pinned [--rounds 5]

"first" is one `torch.empty(pin_memory=True)` of a size that nothing has had before, "again" a pair
of one more and its end, "copied" a pair with a copy to the GPU queued between, and "held" the bytes
that the allocator holds for all of them. "batches" is a pass over a DataLoader that pins batches of
two sizes. A round starts a process for each allocator in turn; a figure is the median over rounds,
a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from time import perf_counter

from bench import markdown
from bench.children import ROOT, environment
from bench.harness import ratios_within_rounds

CONFIGURATIONS = ("native", "full")
SIZES = {"64 KiB": 1 << 16, "33 MiB": 33 << 20, "513 MiB": 513 << 20}
PAIRS = 2000
BATCHES = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torch_pinned", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(figures(chosen.child)))
        return
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(chosen.rounds):
        for name in CONFIGURATIONS:
            command = [sys.executable, "-m", "bench.torch_pinned", "--child", name]
            done = subprocess.run(
                command, cwd=ROOT, env=environment(name), stdout=subprocess.PIPE, check=True
            )
            for what, figure in json.loads(done.stdout.splitlines()[-1]).items():
                samples.setdefault(what, {each: [] for each in CONFIGURATIONS})[name].append(figure)
    rows = []
    for what, taken in samples.items():
        ratios = ratios_within_rounds(taken, "native")
        for name, found in taken.items():
            rows.append([what, name, f"{statistics.median(found):.1f}", f"{ratios[name]:.3f}"])
    print(markdown.table(["figure", "allocator", "median", "/ native"], rows))


def figures(configuration: str) -> dict[str, float]:
    """In a process of its own: microseconds, and MiB held."""
    import torch

    if configuration == "full":
        from gpumem.integrations import torch as gpumem_torch

        gpumem_torch.enable(mode="full")
    there = torch.zeros(max(SIZES.values()), dtype=torch.uint8, device="cuda")
    said = {}
    kept = []
    for size, nbytes in SIZES.items():
        begin = perf_counter()
        kept.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        said[f"first of {size}, us"] = 1e6 * (perf_counter() - begin)
    held = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    said["held, MiB"] = held / (1 << 20)
    del kept
    for size, nbytes in SIZES.items():
        begin = perf_counter()
        for _ in range(PAIRS):
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        said[f"again {size}, us"] = 1e6 * (perf_counter() - begin) / PAIRS
    small = there[: SIZES["64 KiB"]]
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(PAIRS):
        small.copy_(torch.empty(small.shape, dtype=torch.uint8, pin_memory=True), non_blocking=True)
    torch.cuda.synchronize()
    said["copied 64 KiB, us"] = 1e6 * (perf_counter() - begin) / PAIRS
    said["batches, us"] = 1e6 * seconds_of_batches() / BATCHES
    return said


def seconds_of_batches() -> float:
    """Pin batches of images and labels in a DataLoader's thread, and copy each to the GPU."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(torch.zeros(8 * BATCHES, 3, 128, 128), torch.zeros(8 * BATCHES))
    begin = perf_counter()
    for images, labels in DataLoader(rows, batch_size=8, pin_memory=True):
        images.to("cuda", non_blocking=True)
        labels.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return perf_counter() - begin


if __name__ == "__main__":
    main()

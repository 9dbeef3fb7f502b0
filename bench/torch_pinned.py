"""PyTorch's pinned memory, of its own allocator and of gpumem's arena.

    python -m bench.torch_pinned [--rounds 5] [--without-held]

"first" is one `torch.empty(pin_memory=True)` of a size that nothing has had before, "again" a pair
of one more and its end, in the fastest of many runs of pairs, "copied" a pair with a copy to the
GPU queued between. "held" is the bytes that the allocator holds at its peak, over those requested
then: eight tensors of 65 MiB, and random sizes with a bound on the live bytes. These sizes are the
same in each round, so only the first round has them. "batches" is a pass over a DataLoader that
pins batches of two sizes. The allocators are PyTorch's own, gpumem's of pinned memory alone, and
gpumem's of both memories. A round starts a process for each in turn; a
figure is the median over rounds, a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from time import perf_counter

from bench import markdown
from bench.children import ROOT, environment
from bench.harness import ratios_within_rounds

CONFIGURATIONS = ("native", "pinned", "full")
SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "33 MiB": 33 << 20, "513 MiB": 513 << 20}
PAIRS = 500
RUNS = 30
BATCHES = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torch_pinned", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=700, help="MiB of the random sizes")
    parser.add_argument("--live", type=int, default=16, help="GiB of them at a time")
    parser.add_argument("--child", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--held", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without-held", action="store_true", help="leave out the bytes held")
    chosen = parser.parse_args()
    if chosen.child:
        said = figures(chosen.child)
        if chosen.held:
            said |= figures_of_held(chosen.largest << 20, chosen.live << 30)
        print(json.dumps(said))
        return
    samples: dict[str, dict[str, list[float]]] = {}
    for number in range(chosen.rounds):
        for name in CONFIGURATIONS:
            begin = perf_counter()
            command = [sys.executable, "-m", "bench.torch_pinned", "--child", name]
            command += ["--largest", str(chosen.largest), "--live", str(chosen.live)]
            command += [] if number or chosen.without_held else ["--held"]
            variables = environment("full" if name == "full" else "native")
            done = subprocess.run(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, check=True
            )
            for what, figure in json.loads(done.stdout.splitlines()[-1]).items():
                samples.setdefault(what, {each: [] for each in CONFIGURATIONS})[name].append(figure)
            print(f"round {number}, {name}: {perf_counter() - begin:.0f} s", file=sys.stderr)
    rows = []
    for what, taken in samples.items():
        ratios = ratios_within_rounds(taken, "native")
        for name, found in taken.items():
            rows.append([what, name, f"{statistics.median(found):.3f}", f"{ratios[name]:.3f}"])
    print(markdown.table(["figure", "allocator", "median", "/ native"], rows))


def figures(configuration: str) -> dict[str, float]:
    """Return microseconds, in a process of its own."""
    import torch

    if configuration != "native":
        from gpumem.integrations import torch as gpumem_torch

        if configuration == "full":
            gpumem_torch.enable(mode="full")
        else:
            gpumem_torch.enable_pinned()
    there = torch.zeros(max(SIZES.values()), dtype=torch.uint8, device="cuda")
    said = {}
    kept = []
    for size, nbytes in SIZES.items():
        begin = perf_counter()
        kept.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        said[f"first of {size}, us"] = 1e6 * (perf_counter() - begin)
    del kept
    for size, nbytes in SIZES.items():
        said[f"again {size}, us"] = 1e6 * min(seconds_of_pairs(nbytes) for _ in range(RUNS)) / PAIRS
    small = there[: SIZES["64 KiB"]]
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(PAIRS):
        small.copy_(torch.empty(small.shape, dtype=torch.uint8, pin_memory=True), non_blocking=True)
    torch.cuda.synchronize()
    said["copied 64 KiB, us"] = 1e6 * (perf_counter() - begin) / PAIRS
    said["batches, us"] = 1e6 * seconds_of_batches() / BATCHES
    return said


def figures_of_held(largest: int, live: int) -> dict[str, float]:
    """Return bytes held over those requested; later in the same process."""
    import torch

    torch._C._host_emptyCache()
    draw = random.Random(1)
    sizes = [draw.randrange(1 << 20, largest) for _ in range(600)]
    of_random = held_over_requested(sizes, live)
    torch._C._host_emptyCache()
    of_equal = held_over_requested([65 << 20] * 8, 1 << 40)
    return {"held of random sizes": of_random, "held of 8 x 65 MiB": of_equal}


def seconds_of_pairs(nbytes: int) -> float:
    """Make and free a tensor `PAIRS` times."""
    import torch

    begin = perf_counter()
    for _ in range(PAIRS):
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return perf_counter() - begin


def held_over_requested(sizes: list[int], live: int) -> float:
    """Keep tensors of these sizes, at most `live` bytes of them; the peaks' ratio."""
    import torch

    draw = random.Random(7)
    kept: list[torch.Tensor] = []
    requested = peak = held = 0
    for size in sizes:
        while requested + size > live:
            requested -= kept.pop(draw.randrange(len(kept))).nbytes
        kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        requested += size
        peak = max(peak, requested)
        held = max(held, torch.cuda.host_memory_stats()["allocated_bytes.current"])
    return held / peak


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

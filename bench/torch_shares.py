"""How long a CUDA tensor takes to another process, over PyTorch's allocator and over gpumem.

    python -m bench.torch_shares [--device cuda:0] [--rounds 5] [--tensors 10]

A process makes tensors and puts each into a queue of `torch.multiprocessing`; a second process with
the same allocator reads the last element and sends it back. A pass is the time from the `put` until
the element is here. "new" is a tensor that the second process has not seen, "again" the same
one once more. A round starts one pair of processes for each allocator in turn; a figure is the
median over rounds of a round's median, a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

from bench import markdown
from bench.children import ROOT, environment
from bench.harness import ratios_within_rounds

CONFIGURATIONS = ("native", "full")
SIZES = {"64 KiB": 1 << 16, "32 MiB": 1 << 25, "256 MiB": 1 << 28}
PASSES = ("new", "again")
TIMEOUT = 60.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torch_shares", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=10, help="of each size in a round")
    parser.add_argument("--child", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(passes_of_each_size(chosen.child, chosen.device, chosen.tensors)))
        return
    samples = measured(chosen.device, chosen.rounds, chosen.tensors)
    rows = []
    for size in SIZES:
        for which in PASSES:
            taken = {name: rounds[size, which] for name, rounds in samples.items()}
            ratios = ratios_within_rounds(taken, "native")
            for name, seconds in taken.items():
                spent = f"{statistics.median(seconds) * 1e6:.0f}"
                rows.append([size, which, name, spent, f"{ratios[name]:.3f}"])
    print(markdown.table(["tensor", "passed", "allocator", "us", "/ native"], rows))


def measured(
    device: str, rounds: int, tensors: int
) -> dict[str, dict[tuple[str, str], list[float]]]:
    """Return each round's median seconds, of each allocator, size and kind of pass."""
    samples: dict[str, dict[tuple[str, str], list[float]]] = {
        name: {(size, which): [] for size in SIZES for which in PASSES} for name in CONFIGURATIONS
    }
    for _ in range(rounds):
        for name in CONFIGURATIONS:
            command = [sys.executable, "-m", "bench.torch_shares", "--child", name]
            command += ["--device", device, "--tensors", str(tensors)]
            done = subprocess.run(
                command, cwd=ROOT, env=environment(name), stdout=subprocess.PIPE, check=True
            )
            for size, answers in json.loads(done.stdout.splitlines()[-1]).items():
                for which in PASSES:
                    samples[name][size, which].append(statistics.median(answers[which]))
    return samples


def passes_of_each_size(
    configuration: str, device: str, count: int
) -> dict[str, dict[str, list[float]]]:
    """In the first process: start the second, pass tensors of each size, return the seconds."""
    import torch
    import torch.multiprocessing as multiprocessing

    from bench.workloads import allocators

    where = torch.device(device)
    allocators.install(configuration, where)
    context = multiprocessing.get_context("spawn")
    given, answers = context.Queue(), context.Queue()
    arguments = (configuration, device, given, answers)
    process = context.Process(target=read_last_elements, args=arguments, daemon=True)
    process.start()

    def seconds(tensor: torch.Tensor) -> float:
        expected = tensor[-1].item()  # waits for the device
        begin = perf_counter()
        given.put(tensor)
        found = answers.get(timeout=TIMEOUT)
        took = perf_counter() - begin
        if found != expected:
            raise RuntimeError(f"the other process read {found} in place of {expected}")
        return took

    seconds(torch.ones(512, device=where))  # until both have started
    said = {}
    for size, nbytes in SIZES.items():
        tensors = [torch.full((nbytes // 4,), float(i), device=where) for i in range(1, count + 1)]
        said[size] = {which: [seconds(tensor) for tensor in tensors] for which in PASSES}
        del tensors
    given.put(None)
    process.join(TIMEOUT)
    return said


def read_last_elements(configuration: str, device: str, given: Any, answers: Any) -> None:
    """In the second process: send back the last element of each tensor, until there is none."""
    import torch

    from bench.workloads import allocators

    where = torch.device(device)
    allocators.install(configuration, where)
    torch.zeros(1, device=where)
    while (tensor := given.get(timeout=TIMEOUT)) is not None:
        answers.put(tensor[-1].item())
        del tensor


if __name__ == "__main__":
    main()

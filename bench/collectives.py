"""NCCL over memory that gpumem has registered, over default pages, and over PyTorch's own.

One process for each GPU; in each round every kind of memory takes its turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from bench import markdown
from bench.children import launch

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 256 * MIB)  # bytes
CALLS = 20  # queued between two looks at the clock


def rank(rounds: int) -> None:
    """Measure as one rank; the first one prints the medians as JSON, in microseconds."""
    import torch
    import torch.distributed as dist

    import gpumem
    from gpumem.integrations import nccl

    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    pages = gpumem.Arena(f"cuda:{device.index}")
    source = nccl.RegisteredSource(gpumem.Arena(f"cuda:{device.index}"), dist.group.WORLD)
    registered = gpumem.Arena(f"cuda:{device.index}", source=source)

    def over(arena: gpumem.Arena, nbytes: int) -> Any:
        return torch.from_dlpack(gpumem.empty(nbytes // 4, "float32", resource=arena))

    def seconds(call: Any, tensor: Any) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call(tensor)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / CALLS

    other = (dist.get_rank() + 1) % dist.get_world_size()

    def send_and_receive(tensor: Any) -> None:
        half = len(tensor) // 2
        pair = [
            dist.P2POp(dist.isend, tensor[:half], other),
            dist.P2POp(dist.irecv, tensor[half:], (dist.get_rank() - 1) % dist.get_world_size()),
        ]
        for request in dist.batch_isend_irecv(pair):
            request.wait()

    found: dict[str, list[float]] = {}
    for nbytes in SIZES:
        memories = {
            "PyTorch's": torch.empty(nbytes // 4, device=device),
            "default pages": over(pages, nbytes),
            "registered": over(registered, nbytes),
        }
        for name, call in (("all-reduce", dist.all_reduce), ("send/receive", send_and_receive)):
            for number in range(-1, rounds):
                for memory, tensor in memories.items():
                    tensor.fill_(1)
                    time_of_one = seconds(call, tensor)
                    if number >= 0:  # the first round connects and registers
                        key = f"{name} of {nbytes // MIB} MiB|{memory}"
                        found.setdefault(key, []).append(1e6 * time_of_one)
            for memory, tensor in memories.items():
                tensor.fill_(dist.get_rank() + 1)
                call(tensor)
                expected = {
                    "all-reduce": sum(range(1, dist.get_world_size() + 1)),
                    "send/receive": (dist.get_rank() - 1) % dist.get_world_size() + 1,
                }[name]
                assert bool((tensor[-100:] == expected).all()), (name, memory)
    if dist.get_rank() == 0:
        print(json.dumps({key: statistics.median(times) for key, times in found.items()}))
    dist.barrier()
    torch.cuda.synchronize()
    del memories, tensor
    registered.close()
    dist.destroy_process_group()


def table(medians: dict[str, float]) -> str:
    """One line for each operation and memory."""
    body = []
    for key, time_of_one in medians.items():
        operation, memory = key.split("|")
        theirs = medians[f"{operation}|PyTorch's"]
        body.append([operation, memory, f"{time_of_one:.1f}", f"{time_of_one / theirs:.3f}"])
    return markdown.table(["operation", "memory", "us", "/ PyTorch's"], body)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.collectives", description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        rank(chosen.rounds)
        return 0
    command = [sys.executable, "-m", "bench.collectives", "--rounds", str(chosen.rounds)]
    printed = launch(command, chosen.gpus)
    print(table(json.loads(printed.splitlines()[-1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())

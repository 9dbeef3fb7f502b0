"""What the programs of this folder share: their ranks, a small model, and training it."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import gpumem
from gpumem.integrations import torch as gpumem_torch

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
except ImportError as error:
    print(f"this example needs PyTorch: {error}")
    sys.exit()

WIDTH, LAYERS, BATCH, STEPS = 64, 4, 32, 5


@dataclass
class Rank:
    """One process of the group; `arena` serves PyTorch's tensors on its GPU."""

    number: int
    count: int
    device: torch.device
    arena: gpumem.Arena | None

    def mesh(self) -> DeviceMesh:
        """Return all ranks, in one dimension."""
        return init_device_mesh(self.device.type, (self.count,))

    def tell(self, line: str) -> None:
        """Print a line once for all ranks."""
        if self.number == 0:
            print(line, flush=True)

    def tell_memory(self) -> None:
        """Print what each rank's arena has held, in the order of ranks."""
        for number in range(self.count):
            if number == self.number and self.arena is not None:
                stats = self.arena.stats()
                mib = 1 << 20
                print(
                    f"rank {number}: at most {stats.max_in_use / mib:.1f} MiB in use, "
                    f"{stats.max_reserved / mib:.1f} MiB reserved",
                    flush=True,
                )
            dist.barrier()


def start(program: Callable[[Rank], None], description: str | None) -> None:
    """Run a program as ranks: one for each GPU, or on the CPU where there are too few."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--record", metavar="FOLDER", help="write rank0.rec and so on there")
    given = parser.parse_args()
    count = given.ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kind = "cuda" if torch.cuda.device_count() >= count else "cpu"
    arguments = (program, count, kind, port, given.record)
    torch.multiprocessing.spawn(_run, arguments, nprocs=count)


def _run(
    number: int,
    program: Callable[[Rank], None],
    count: int,
    kind: str,
    port: int,
    folder: str | None,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    arena = None
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", number)
        arena = gpumem.Arena(f"cuda:{number}")
        gpumem_torch.enable(arena)  # before the first tensor on a GPU
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        rank=number,
        world_size=count,
        device_id=device if kind == "cuda" else None,
    )
    rank = Rank(number, count, device, arena)
    rank.tell(f"{count} ranks, tensors on {kind}")
    # Each rank into a file of its own, which is there even if the rank is killed.
    path = folder and os.path.join(folder, f"rank{number}.rec")
    with gpumem.observe.record(path=path) if path else nullcontext():
        program(rank)
    rank.tell_memory()
    dist.destroy_process_group()


# ---- a model, and its training in one process ----------------------------------------------------


class Block(nn.Module):
    """A feed-forward part with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with what the block adds to it."""
        return x + self.down(torch.relu(self.up(x)))


def make_model(device: torch.device) -> nn.Sequential:
    """Return the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same rows and targets in every process."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x.to(device), x.roll(1, 1).to(device)


def losses_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: slice,
    device: torch.device,
) -> list[torch.Tensor]:
    """Train on these rows of each batch; returns the losses."""
    losses = []
    for step in range(STEPS):
        x, target = batch(step, device)
        loss = nn.functional.mse_loss(model(x[rows]), target[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def reference(device: torch.device) -> list[float]:
    """Return the losses of one process that has everything."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return [float(loss) for loss in losses_of(model, optimizer, slice(None), device)]


def tell_losses(rank: Rank, losses: list[float]) -> None:
    """Print the losses, and whether they are those of one process."""
    alone = reference(rank.device)
    same = torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-3)
    rank.tell(f"loss {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.4f}")
    rank.tell(f"as in one process: {same}")

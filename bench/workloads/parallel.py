"""Training of Llama's kind over several processes, one for each device: PyTorch's own ways.

Each rank draws the same shapes; with fully sharded data its own tokens, else the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from bench.workloads.language import LanguageTraining, Learning
from bench.workloads.transformer import Block, Decoder, Decoding, norm
from bench.workloads.workload import Workload

MEDIUM = Decoding(32_000, 2048, 16, 16, 4, 5632, positions=65_536)
TINY = Decoding(61, 16, 2, 2, 1, 32, positions=256)


def mesh_of(device: torch.device) -> DeviceMesh:
    """Return all ranks, the process group having been made from the environment if it was not."""
    if not dist.is_initialized():
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    return init_device_mesh(device.type, (dist.get_world_size(),))


class FullyShardedTraining(LanguageTraining):
    """FSDP2: each block's weights are gathered before it works, and let go after it."""

    SIZES: ClassVar = {
        "full": Learning(MEDIUM, 12_288, (4, 6, 8, 12)),
        "tiny": Learning(TINY, 64, (1, 2, 3)),
    }

    def start(self) -> None:
        mesh = mesh_of(self.device)
        self.generator.manual_seed(self.random.randrange(1 << 30) + dist.get_rank())
        self.model = self.built(lambda: Decoder(self.size.model), self.dtype)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)


class TensorParallelTraining(LanguageTraining):
    """The feed-forward parts are split over the ranks, by columns and then by rows."""

    SIZES: ClassVar = FullyShardedTraining.SIZES

    def start(self) -> None:
        mesh = mesh_of(self.device)
        self.model = self.built(lambda: Decoder(self.size.model), self.dtype)
        for block in self.model.blocks:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block.feed, mesh, plan)
        # One call for each parameter: some are whole here, some are split.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, foreach=False)


@dataclass(frozen=True)
class Stages:
    """A decoder cut into as many stages as there are ranks; up to `scale` tokens a step."""

    model: Decoding
    scale: int
    microbatches: int


class Stage(nn.Module):
    """Some consecutive blocks; the first stage embeds tokens, the last returns logits."""

    def __init__(self, of: Decoding, number: int, count: int) -> None:
        super().__init__()
        first, last = (of.layers * edge // count for edge in (number, number + 1))
        self.blocks = nn.ModuleList(Block(of, layer) for layer in range(first, last))
        self.embedding = nn.Embedding(of.vocabulary, of.width) if number == 0 else None
        self.leave = (
            nn.Sequential(norm(of), nn.Linear(of.width, of.vocabulary, bias=False))
            if number == count - 1
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, None, 0)
        return x if self.leave is None else self.leave(x)


class PipelineTraining(Workload):
    """One forward and one backward in turn (1F1B); each shape of a step has its own schedule."""

    SIZES: ClassVar = {"full": Stages(MEDIUM, 8192, 4), "tiny": Stages(TINY, 64, 2)}
    LENGTHS: ClassVar = (0.5, 0.75, 1.0)
    size: Stages

    def start(self) -> None:
        mesh_of(self.device)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.stage = self.built(lambda: Stage(self.size.model, self.rank, self.count), self.dtype)
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), 1e-4)
        self.schedules: dict[int, Schedule1F1B] = {}

    def step(self) -> torch.Tensor:
        batch = self.size.microbatches * 2
        length = int(self.scale * self.random.choice(self.LENGTHS)) // batch
        batch, length = self.draw(batch, length)
        tokens = self.tokens(self.size.model.vocabulary, batch, length + 1)
        losses: list[torch.Tensor] = []
        schedule = self.schedules.get(length) or self.scheduled(length)
        given = {"target": tokens[:, 1:]} if self.rank == self.count - 1 else {}
        arguments = (tokens[:, :-1].contiguous(),) if self.rank == 0 else ()
        schedule.step(*arguments, losses=losses, **given)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if losses:
            return torch.stack(losses).mean().detach()
        return next(self.stage.parameters()).detach().flatten()[0].clone()

    def scheduled(self, length: int) -> Schedule1F1B:
        stage = PipelineStage(self.stage, self.rank, self.count, self.device)
        schedule = Schedule1F1B(stage, self.size.microbatches, loss_fn=token_loss)
        self.schedules[length] = schedule
        return schedule


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

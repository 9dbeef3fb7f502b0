"""Pipeline parallel training (1F1B): each GPU has some of the layers, and an arena.

python examples/distributed/pipeline.py [--ranks 4]
"""

# `ranks` is imported first: it ends the program where PyTorch is missing.
from ranks import LAYERS, STEPS, Rank, batch, make_model, start, tell_losses

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

PARTS = 8  # of a batch, which are on their way at once


def train(rank: Rank) -> None:
    """Train this rank's layers; the first has the rows, the last the losses."""
    first, last = (LAYERS * edge // rank.count for edge in (rank.number, rank.number + 1))
    layers = make_model(rank.device)[first:last]
    stage = PipelineStage(layers, rank.number, rank.count, rank.device)
    schedule = Schedule1F1B(stage, PARTS, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
    losses = torch.zeros(STEPS, device=rank.device)
    for step in range(STEPS):
        x, target = batch(step, rank.device)
        of_parts: list[torch.Tensor] = []
        if rank.number == 0:
            schedule.step(x)
        elif rank.number == rank.count - 1:
            schedule.step(target=target, losses=of_parts)
            losses[step] = torch.stack(of_parts).detach().mean()
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.broadcast(losses, rank.count - 1)
    tell_losses(rank, losses.tolist())


if __name__ == "__main__":
    start(train, __doc__)

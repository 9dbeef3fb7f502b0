"""Fully sharded training (FSDP2) with an arena on each GPU.

    python examples/distributed/fsdp2.py [--ranks 4]

Each rank keeps its part of every weight, gathers a block's weights before the block works, and
lets them go after it: blocks that come and go at every step, which the arena serves.
"""

# `ranks` is imported first: it ends the program where PyTorch is missing.
from ranks import BATCH, Rank, losses_of, make_model, start, tell_losses

# isort: split
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def train(rank: Rank) -> None:
    """Shard every block's weights, and train on this rank's rows of each batch."""
    model = make_model(rank.device)
    for block in model:
        fully_shard(block, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    share = BATCH // rank.count
    rows = slice(rank.number * share, (rank.number + 1) * share)
    losses = torch.stack(losses_of(model, optimizer, rows, rank.device))
    dist.all_reduce(losses)
    tell_losses(rank, (losses / rank.count).tolist())


if __name__ == "__main__":
    start(train, __doc__)

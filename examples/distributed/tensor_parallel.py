"""Tensor parallel training: each layer's weights are split over the GPUs, an arena on each.

python examples/distributed/tensor_parallel.py [--ranks 4]
"""

# `ranks` is imported first: it ends the program where PyTorch is missing.
from ranks import Rank, losses_of, make_model, start, tell_losses

# isort: split
import torch
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def train(rank: Rank) -> None:
    """Split every block's weights, and train on all rows."""
    model = make_model(rank.device)
    for block in model:
        # By columns and then by rows: one sum over the ranks for each block.
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, rank.mesh(), plan)
    # One call for each parameter: some are whole here, some are split.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    losses = losses_of(model, optimizer, slice(None), rank.device)
    tell_losses(rank, [float(loss) for loss in losses])


if __name__ == "__main__":
    start(train, __doc__)

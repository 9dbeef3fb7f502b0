"""A sharded checkpoint (DCP) that is written out of a pinned arena while training goes on.

    python examples/distributed/checkpoint.py [--ranks 4]

`async_save` first copies the state to the CPU, and the step waits for that. Here the copies go to
blocks of an arena of pinned memory: made once, of exact size, and used again by each checkpoint.
"""

import tempfile
from typing import Any

# `ranks` is imported first: it ends the program where PyTorch is missing.
from ranks import Rank, losses_of, make_model, start

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import gpumem


class ArenaStager(AsyncStager):
    """Copies tensors to an arena of memory that the CPU reads.

    One checkpoint is on its way at a time: its tensors are used again by the next one.
    """

    _synchronize_after_execute = False  # the copies have arrived when `stage` returns

    def __init__(self, arena: gpumem.Arena) -> None:
        self.arena = arena
        self._copies: dict[tuple[int, Any], torch.Tensor] = {}
        self._count = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state with its tensors' bytes as they are now, on the CPU."""
        self._count = 0
        staged = tree_map_only(torch.Tensor, self._staged, state_dict)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return staged

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            # The same shards of the same mesh, on the CPU.
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            inner["_local_tensor"] = self._staged(tensor.to_local())
            shape, stride = tensor.shape, tensor.stride()
            return DTensor.__tensor_unflatten__(inner, context, shape, stride)
        key = (self._count, (tuple(tensor.shape), tensor.dtype))
        self._count += 1
        if key not in self._copies:
            block = gpumem.empty(tensor.numel() * tensor.itemsize, "uint8", resource=self.arena)
            flat = torch.from_dlpack(block).view(tensor.dtype)
            self._copies[key] = flat.view(tensor.shape)
        return self._copies[key].copy_(tensor.detach(), non_blocking=True)

    def close(self) -> None:
        """Let the blocks go."""
        self._copies.clear()


def train(rank: Rank) -> None:
    """Train and save in turns, then read the last checkpoint."""
    model = make_model(rank.device)
    fully_shard(model, mesh=rank.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    pinned = gpumem.Arena(
        f"cuda:{rank.number}/host_accessible" if rank.arena else "host/host_accessible"
    )
    stager = ArenaStager(pinned)
    folders = [tempfile.mkdtemp() if rank.number == 0 else None]
    dist.broadcast_object_list(folders)
    group = dist.new_group(backend="gloo")  # the checkpoint's own, on the CPU
    allocations = []
    for number in range(3):
        losses_of(model, optimizer, slice(None), rank.device)
        state = {"model": get_model_state_dict(model)}
        written = dcp.async_save(
            state,
            checkpoint_id=f"{folders[0]}/{number}",
            process_group=group,
            async_stager=stager,
        )
        before = [shard(value).clone() for value in state["model"].values()]
        losses_of(model, optimizer, slice(None), rank.device)  # goes on meanwhile
        written.result()
        allocations.append(pinned.stats().num_allocs)
    more = allocations[-1] - allocations[0]
    rank.tell(f"blocks made for the first checkpoint: {allocations[0]}, for two more: {more}")
    restored = {"model": get_model_state_dict(model)}
    dcp.load(restored, checkpoint_id=f"{folders[0]}/2", process_group=group)
    same = all(
        torch.equal(shard(value), old)
        for value, old in zip(restored["model"].values(), before, strict=True)
    )
    rank.tell(f"as it was when it was saved: {same}")


def shard(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight."""
    return value.to_local() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    start(train, __doc__)

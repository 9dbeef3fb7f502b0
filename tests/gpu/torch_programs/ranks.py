"""Programs of several GPUs: each rank runs them as a process of its own, and prints its losses."""

import os

import torch
import torch.distributed as dist
from gpu.torch_programs.trained import model, steps
from torch.distributed.device_mesh import init_device_mesh


def begin():
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (count,))
    return rank, mesh


def end(losses):
    dist.destroy_process_group()
    return losses


def ddp():
    from torch.nn.parallel import DistributedDataParallel

    rank, _ = begin()
    own = DistributedDataParallel(model().cuda(), device_ids=[rank])
    return end(steps(own, torch.optim.AdamW(own.parameters())))


def fsdp():
    from torch.distributed.fsdp import fully_shard

    _, mesh = begin()
    own = torch.nn.Sequential(model(), model()).cuda()
    for each in own:
        fully_shard(each, mesh=mesh)
    fully_shard(own, mesh=mesh)
    return end(steps(own, torch.optim.AdamW(own.parameters())))


def tensor_parallel():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    _, mesh = begin()
    own = parallelize_module(model().cuda(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return end(steps(own, torch.optim.AdamW(own.parameters(), foreach=False)))


def copies_between_devices():
    """A tensor that another device makes, copied and read there."""
    rank, _ = begin()
    count = torch.cuda.device_count()
    said = []
    for other in range(count):
        tensor = torch.full((1 << 18,), float(other + 1), device=f"cuda:{other}")
        said.append(float(tensor.to(f"cuda:{rank}").sum()))
    return end(said)


def symmetric_memory():
    """Memory that each rank writes, and the rank before it reads where it lies."""
    from torch.distributed import _symmetric_memory as symmetric

    rank, mesh = begin()
    tensor = symmetric.empty(1 << 18, device=f"cuda:{rank}")
    handle = symmetric.rendezvous(tensor, mesh.get_group())
    tensor.fill_(rank + 1)
    handle.barrier()
    other = handle.get_buffer((rank + 1) % mesh.size(), tensor.shape, tensor.dtype)
    said = [float(other.sum())]
    handle.barrier()  # nobody leaves while another one reads
    return end(said)

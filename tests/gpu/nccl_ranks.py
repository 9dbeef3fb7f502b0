"""One rank of test_nccl_on_gpus.py, as a program: collectives over registered memory."""

import os
import sys

import torch
import torch.distributed as dist

import gpumem
from gpumem.integrations import nccl

MIB = 1 << 20


def main():
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group, count = dist.group.WORLD, dist.get_world_size()
    {"blocks": blocks, "arena": arena, "shut_down": shut_down}[sys.argv[1]](
        f"cuda:{rank}", rank, count, group
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    print("done")


def exchange(memory, rank, count, scale):
    """All-reduce and send in a ring, and see that every element is right."""
    memory.fill_((rank + 1) * scale)
    dist.all_reduce(memory)
    assert bool((memory == scale * count * (count + 1) / 2).all())
    half = len(memory) // 2
    memory[:half] = rank * scale
    pair = [
        dist.P2POp(dist.isend, memory[:half], (rank + 1) % count),
        dist.P2POp(dist.irecv, memory[half:], (rank - 1) % count),
    ]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    assert bool((memory[half:] == (rank - 1) % count * scale).all())


def as_torch(buffer):
    return torch.from_dlpack(gpumem.from_dlpack(buffer)).view(torch.float32)


def blocks(device, rank, count, group):
    """Registered blocks, again and again: each deregistered before its memory goes back."""
    upstream = gpumem.Arena(device)
    for step in range(1, 6):
        buffer = upstream.allocate(step * 4 * MIB, transport="ipc")
        with nccl.register(buffer, group):
            exchange(as_torch(buffer), rank, count, step)
            torch.cuda.synchronize()
        buffer.close()
        upstream.shrink()
    assert upstream.stats().in_use == 0


def arena(device, rank, count, group):
    """An arena over registered regions grows, is used, and gives all of it back."""
    upstream = gpumem.Arena(device)
    with gpumem.Arena(device, source=nccl.RegisteredSource(upstream, group)) as over:
        for step in range(1, 6):
            tensors = [as_torch(over.allocate(size * MIB)) for size in (1, 3, 16 * step)]
            for tensor in tensors:
                exchange(tensor, rank, count, step)
            torch.cuda.synchronize()
            del tensors, tensor
            over.shrink()
    assert upstream.stats().in_use == 0


def shut_down(device, rank, count, group):
    """The process group ends first: its registrations end with it, and the block can go."""
    buffer = gpumem.Arena(device).allocate(4 * MIB, transport="ipc")
    registration = nccl.register(buffer, group)
    exchange(as_torch(buffer), rank, count, 1)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    registration.release()
    assert registration.released


main()

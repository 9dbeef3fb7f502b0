"""CUDA graphs that a program captures itself."""

import gc

import torch
from gpu.torch_programs.allocator import MIB, computed, digest, filled
from torch import nn


def shared_pool():
    """Two graphs of one pool, replayed in the order of their capture; then one of them alone."""
    pool = torch.cuda.graph_pool_handle()
    data = torch.arange(1 << 18, dtype=torch.float32, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        middle = (data * 2).sqrt()
    with torch.cuda.graph(second, pool=pool):
        out = (middle + data).relu() * 3
    assert first.pool() == second.pool() == pool
    said = []
    for round in range(4):
        data.fill_(round + 1)
        filled(8, -1)  # what comes between the launches must not be written by them
        first.replay()
        second.replay()
        said.append(digest(middle, out))
    del first
    gc.collect()
    others = [filled(4, -1) for _ in range(8)]
    second.replay()
    assert all(bool((other == -1).all()) == computed(True) for other in others)
    return [*said, digest(out)]


def pool_of_a_first_graph():
    """A later graph takes the pool of the first by its name."""
    data = torch.ones(1 << 18, device="cuda")
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        one = data + 1
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=first.pool()):
        two = one + 1
    first.replay()
    second.replay()
    return [float(one.sum()), float(two.sum())]


def graphed_callables():
    torch.manual_seed(1)
    own = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()
    sample = torch.randn(32, 128, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(own, (sample,))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        data = torch.randn(32, 128, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad(set_to_none=True)
        loss = graphed(data.requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def outputs_outlive_their_graph():
    data = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = data * 3
        view = out[: 1 << 10]
    graph.replay()
    del graph, out
    gc.collect()
    noise = [filled(4, -1) for _ in range(4)]
    return [digest(view), len(noise)]


def dropped_graphs_give_their_memory_back():
    """It is the same each time: nothing of a dropped graph is left reserved."""
    reserved = []
    for _ in range(4):
        data = filled(4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [data + n for n in range(4)]
        graph.replay()
        assert float(out[3][0]) == computed(3)
        del graph, out, data
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    return [len(set(reserved)) == 1, reserved[0] < 64 * MIB]

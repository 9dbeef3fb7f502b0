"""Neural networks on graphs: attention over edges; neighbours sampled around some nodes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from bench.workloads.workload import Workload


@dataclass(frozen=True)
class Graphs:
    """Graphs of up to `scale` nodes (of `scale` seeds, where neighbours are sampled)."""

    features: int
    width: int
    layers: int
    classes: int
    scale: int
    degree: tuple[int, int]


def summed(values: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """Add up the rows that go to the same node, of `count`."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, at, values)


class GraphTraining(Workload):
    """Adam; the numbers of nodes and edges change from step to step."""

    size: Graphs

    def edges(self, origins: int, targets: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens(origins, count), self.tokens(targets, count)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def learned(self, logits: torch.Tensor) -> torch.Tensor:
        labels = self.tokens(self.size.classes, len(logits))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class GraphAttention(nn.Module):
    """Weighs each edge by its two ends, with `heads` weights, and sums over a node's edges."""

    def __init__(self, channels: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.enter = nn.Linear(channels, width)
        self.origin = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, width // heads) * 0.1)

    def forward(self, x: torch.Tensor, origin: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.enter(x).view(len(x), self.heads, -1)
        score = (h * self.origin).sum(-1)[origin] + (h * self.target).sum(-1)[target]
        weight = F.leaky_relu(score, 0.2).clamp(max=20).exp()
        total = summed(weight, target, len(x)).clamp(min=1e-6)
        weight = weight / total[target]
        return F.elu(summed(h[origin] * weight[..., None], target, len(x)).flatten(1))


class Gat(nn.Module):
    def __init__(self, of: Graphs) -> None:
        super().__init__()
        widths = [of.features] + [of.width] * of.layers
        self.layers = nn.ModuleList(GraphAttention(a, b, 4) for a, b in pairwise(widths))
        self.leave = nn.Linear(of.width, of.classes)

    def forward(self, x: torch.Tensor, origin: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, origin, target)
        return self.leave(x)


class GatTraining(GraphTraining):
    """Each step has a graph of its own, of random size and density."""

    SIZES: ClassVar = {
        "full": Graphs(256, 256, 3, 40, 120_000, (4, 16)),
        "tiny": Graphs(8, 8, 2, 5, 40, (1, 4)),
    }

    def start(self) -> None:
        self.model = self.built(lambda: Gat(self.size))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def step(self) -> torch.Tensor:
        nodes = max(2, int(self.scale * self.random.uniform(0.3, 1)))
        nodes, edges = self.draw(nodes, int(nodes * self.random.uniform(*self.size.degree)))
        x = self.noise(nodes, self.size.features)
        return self.learned(self.model(x, *self.edges(nodes, nodes, edges)))


class Sage(nn.Module):
    """Means of sampled neighbours, one hop a layer: each layer has fewer nodes than that before."""

    def __init__(self, of: Graphs) -> None:
        super().__init__()
        widths = [of.features] + [of.width] * of.layers
        pairs = list(pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.others = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.leave = nn.Linear(of.width, of.classes)

    def forward(
        self, x: torch.Tensor, hops: list[tuple[torch.Tensor, torch.Tensor, int]]
    ) -> torch.Tensor:
        for (origin, target, count), own, others in zip(hops, self.own, self.others, strict=True):
            degree = summed(x.new_ones(len(target), 1), target, count).clamp(min=1)
            mean = summed(x[origin], target, count) / degree
            x = F.relu(own(x[:count]) + others(mean))
        return self.leave(x)


class SampledTraining(GraphTraining):
    """Some seeds and the nodes sampled around them; the further hops share most of their nodes."""

    SIZES: ClassVar = {
        "full": Graphs(512, 256, 3, 47, 1024, (8, 15)),
        "tiny": Graphs(8, 8, 2, 5, 4, (1, 3)),
    }

    def start(self) -> None:
        self.model = self.built(lambda: Sage(self.size))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def step(self) -> torch.Tensor:
        counts = [max(1, int(self.scale * self.random.uniform(0.5, 1)))]
        sampled = []
        for _ in range(self.size.layers):
            edges = int(counts[-1] * self.random.uniform(*self.size.degree))
            sampled.append(max(1, edges))
            counts.append(counts[-1] + int(edges * self.random.uniform(0.3, 0.9)))
        self.draw(*counts)
        hops = [
            (*self.edges(counts[hop + 1], counts[hop], sampled[hop]), counts[hop])
            for hop in reversed(range(self.size.layers))
        ]
        return self.learned(self.model(self.noise(counts[-1], self.size.features), hops))

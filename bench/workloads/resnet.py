"""ResNet-50: training on images; resolution and number change from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from bench.workloads.workload import Workload


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.path = nn.Sequential(
            *convolution(channels, inner, 1),
            nn.ReLU(inplace=True),
            *convolution(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(inner, outer, 1),
        )
        same = channels == outer and stride == 1
        self.skip = nn.Sequential(*([] if same else convolution(channels, outer, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.skip(x))


def convolution(channels: int, out: int, side: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out, side, stride, padding=side // 2, bias=False)
    return [conv, nn.BatchNorm2d(out)]


class ResNet(nn.Module):
    def __init__(self, width: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        stem = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for number in range(depth):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not number else 1))
                channels = 4 * inner
        self.features = nn.Sequential(*stem, *blocks)
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x).mean((2, 3)))


@dataclass(frozen=True)
class Learning:
    """As many pixels as `scale` images of `sides`' middle have, at most, in each step."""

    width: int
    depths: tuple[int, ...]
    classes: int
    scale: int
    sides: tuple[int, ...]
    shares: tuple[float, ...] = (0.4, 0.6, 0.8, 1.0)


class Training(Workload):
    """SGD with momentum, mixed precision, channels last.

    Few different shapes: cuDNN plans each convolution anew for a shape that it has not seen.
    """

    SIZES: ClassVar = {
        "full": Learning(64, (3, 4, 6, 3), 1000, 96, (160, 192, 224, 256, 288)),
        "tiny": Learning(4, (1, 1), 10, 4, (16, 24, 32)),
    }
    size: Learning

    def start(self) -> None:
        model = self.built(lambda: ResNet(self.size.width, self.size.depths, self.size.classes))
        self.model = model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)

    def step(self) -> torch.Tensor:
        sides = self.size.sides
        side = self.random.choice(sides)
        pixels = self.scale * sides[len(sides) // 2] ** 2 * self.random.choice(self.size.shares)
        batch, side = self.draw(max(2, int(pixels / side**2)), side)
        images = torch.randn(batch, 3, side, side, generator=self.generator, device=self.device)
        labels = self.tokens(self.size.classes, batch)
        with self.autocast():
            loss = F.cross_entropy(
                self.model(images.contiguous(memory_format=torch.channels_last)), labels
            )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

"""Trains a small residual network on images, with momentum, on batches of three sizes."""

import torch
from peaks import print_peaks
from torch import nn
from torch.nn import functional as F

CHANNELS, CLASSES, SIDE = (64, 128, 256, 512), 100, 160
BATCHES = (48, 64, 56)


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        stride = 1 if before == after else 2
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.skip(x))


torch.manual_seed(0)
blocks = []
for before, after in zip((CHANNELS[0], *CHANNELS), CHANNELS, strict=False):
    blocks += [Block(before, after), Block(after, after)]
stem = nn.Conv2d(3, CHANNELS[0], 7, 2, 3, bias=False), nn.BatchNorm2d(CHANNELS[0]), nn.ReLU()
ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], CLASSES)
model = nn.Sequential(*stem, *blocks, *ends).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for batch in BATCHES:
    images = torch.randn(batch, 3, SIDE, SIDE).cuda()
    labels = torch.randint(CLASSES, (batch,)).cuda()
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
print_peaks()

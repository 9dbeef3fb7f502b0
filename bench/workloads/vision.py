"""Images: a U-Net at several resolutions; detection with many boxes; windows of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bench.workloads.workload import Workload


@dataclass(frozen=True)
class Images:
    """As many pixels as `scale` images of `sides`' middle have, at most, in each step."""

    width: int
    depth: int
    scale: int
    sides: tuple[int, ...]
    shares: tuple[float, ...] = (0.4, 0.7, 1.0)


class ImageTraining(Workload):
    """AdamW in mixed precision; few shapes, since cuDNN plans its work for every new one."""

    size: Images

    def drawn(self) -> torch.Tensor:
        """Draw the number and the side of a step's images, and the images."""
        sides = self.size.sides
        side = self.random.choice(sides)
        pixels = self.scale * sides[len(sides) // 2] ** 2 * self.random.choice(self.size.shares)
        batch, side = self.draw(max(2, int(pixels / side**2)), side)
        return self.noise(batch, 3, side, side)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def learned(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# ---- U-Net ---------------------------------------------------------------------------------------


class Pair(nn.Sequential):
    """Two convolutions with group norms."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(channels, out, 3, padding=1),
            nn.GroupNorm(4, out),
            nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1),
            nn.GroupNorm(4, out),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Halves the image `depth` times and widens it again, with the features of each size."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Pair(w, w) for w in widths[:-1])
        self.shrink = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, 2) for w in widths[:-1])
        self.middle = Pair(widths[-1], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:-1])
        self.up = nn.ModuleList(Pair(2 * w, w) for w in widths[:-1])
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.enter(x), []
        for pair, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(pair(x))
            x = shrink(kept[-1])
        x = self.middle(x)
        for level in reversed(range(len(kept))):
            x = self.up[level](torch.cat([self.grow[level](x), kept.pop()], 1))
        return self.leave(x)


class UNetTraining(ImageTraining):
    """Noise is predicted, as in diffusion."""

    SIZES: ClassVar = {
        "full": Images(64, 3, 16, (128, 192, 256, 320, 384)),
        "tiny": Images(8, 1, 3, (8, 12, 16)),
    }

    def start(self) -> None:
        self.model = self.built(lambda: UNet(self.size.width, self.size.depth))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def step(self) -> torch.Tensor:
        images = self.drawn()
        noise = torch.randn_like(images)
        with self.autocast():
            loss = F.mse_loss(self.model(images + noise), noise)
        return self.learned(loss)


# ---- Detection -----------------------------------------------------------------------------------


class Detector(nn.Module):
    """A convolutional backbone; a head for each box, and one for the masks of some of them."""

    POOLED = 7  # a box is read at as many points each way

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        stages, channels = [nn.Conv2d(3, width, 7, 2, 3), nn.ReLU()], width
        for _ in range(depth):
            stages += [nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GroupNorm(4, 2 * channels)]
            stages += [nn.ReLU(), nn.Conv2d(2 * channels, 2 * channels, 3, 1, 1), nn.ReLU()]
            channels *= 2
        self.backbone = nn.Sequential(*stages)
        self.box = nn.Sequential(
            nn.Linear(channels * self.POOLED**2, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, classes + 4),
        )
        self.mask = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(channels, channels, 2, 2),
            nn.ReLU(),
            nn.Conv2d(channels, classes, 1),
        )

    def forward(
        self, images: torch.Tensor, boxes: torch.Tensor, masked: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look at boxes (image, top, left, bottom, right, as shares), at some of them closely."""
        features = self.backbone(images)
        pooled = self.pooled(features, boxes)
        return self.box(pooled.flatten(1)), self.mask(pooled[:masked])

    def pooled(self, features: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        height, width = features.shape[2:]
        steps = (torch.arange(self.POOLED, device=boxes.device) + 0.5) / self.POOLED
        rows = boxes[:, 1, None] + (boxes[:, 3] - boxes[:, 1])[:, None] * steps
        columns = boxes[:, 2, None] + (boxes[:, 4] - boxes[:, 2])[:, None] * steps
        rows, columns = (rows * (height - 1)).long(), (columns * (width - 1)).long()
        number = boxes[:, 0].long()[:, None, None]
        found = features.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]]
        return found.permute(0, 3, 1, 2)


class DetectionTraining(ImageTraining):
    """Each step has its own numbers of boxes and of masks."""

    SIZES: ClassVar = {
        "full": Images(64, 3, 8, (384, 512, 640, 768)),
        "tiny": Images(8, 1, 3, (16, 24, 32)),
    }
    CLASSES: ClassVar = 81
    BOXES: ClassVar = {"full": (100, 2000), "tiny": (2, 9)}

    def __init__(self, size: str, *given: object) -> None:
        self.boxes = self.BOXES[size]
        super().__init__(size, *given)

    def start(self) -> None:
        self.model = self.built(lambda: Detector(self.size.width, self.size.depth, self.CLASSES))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def step(self) -> torch.Tensor:
        images = self.drawn()
        count, masked = self.draw(self.random.randint(*self.boxes), self.random.randint(1, 128))
        corners = torch.rand(count, 2, 2, generator=self.generator, device=self.device).sort(1)[0]
        numbers = self.tokens(len(images), count, 1).float()
        labels = self.tokens(self.CLASSES, count)
        with self.autocast():
            seen, masks = self.model(images, torch.cat([numbers, corners.flatten(1)], 1), masked)
            loss = F.cross_entropy(seen[:, : self.CLASSES].float(), labels)
            loss = loss + F.smooth_l1_loss(seen[:, self.CLASSES :], torch.ones_like(seen[:, :4]))
            loss = loss + F.binary_cross_entropy_with_logits(masks, torch.ones_like(masks))
        return self.learned(loss)


# ---- Windows of attention ------------------------------------------------------------------------


class WindowBlock(nn.Module):
    """Attention within windows, shifted by half of one in every second block."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.before(x))
        return x + self.feed(self.after(x))

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x.shape
        w = self.window
        x = x.roll((-self.shift, -self.shift), (1, 2))
        x = x.view(batch, height // w, w, width // w, w, channels).transpose(2, 3)
        q, k, v = (
            part.reshape(-1, w * w, self.heads, channels // self.heads).transpose(1, 2)
            for part in self.enter(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = y.reshape(batch, height // w, width // w, w, w, channels).transpose(2, 3)
        y = self.leave(y.reshape(batch, height, width, channels))
        return y.roll((self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    """Stages of window blocks; between two, four neighbours become one of twice the width."""

    PATCH, WINDOW = 4, 4

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, self.PATCH, self.PATCH)
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for stage in range(depth):
            here = width << stage
            self.stages.append(
                nn.Sequential(
                    *(
                        WindowBlock(here, here // 8, self.WINDOW, number % 2 * self.WINDOW // 2)
                        for number in range(2)
                    )
                )
            )
            self.merges.append(nn.Linear(4 * here, 2 * here))
        self.classify = nn.Linear(width << depth, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.enter(images).permute(0, 2, 3, 1)
        for blocks, merge in zip(self.stages, self.merges, strict=True):
            x = blocks(x)
            quarters = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
            x = merge(torch.cat(quarters, -1))
        return self.classify(x.mean((1, 2)))


class SwinTraining(ImageTraining):
    """An average of the weights over the steps is kept next to them."""

    # Every stage needs whole windows: sides are multiples of PATCH * WINDOW * 2**(depth - 1).
    SIZES: ClassVar = {
        "full": Images(96, 3, 96, (128, 192, 256, 320)),
        "tiny": Images(8, 1, 3, (16, 32, 48)),
    }
    CLASSES: ClassVar = 1000

    def start(self) -> None:
        self.model = self.built(lambda: Swin(self.size.width, self.size.depth, self.CLASSES))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def step(self) -> torch.Tensor:
        images = self.drawn()
        labels = self.tokens(self.CLASSES, len(images))
        with self.autocast():
            loss = F.cross_entropy(self.model(images).float(), labels)
        learned = self.learned(loss)
        self.average.update_parameters(self.model)
        return learned

"""Workloads of decoders of any kind: training on random lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bench.workloads.transformer import Decoder, Decoding, next_token_loss
from bench.workloads.workload import Workload


@dataclass(frozen=True)
class Learning:
    """A decoder in training; a step has up to `scale` tokens, in one of `batches` sequences."""

    model: Decoding
    scale: int
    batches: tuple[int, ...]
    mixed: bool = False  # weights in float32, work in bfloat16


class LanguageTraining(Workload):
    """AdamW; each step has its own batch size and length."""

    size: Learning

    KIND: ClassVar[type[Decoder]] = Decoder

    def start(self) -> None:
        self.model = self.built(
            lambda: self.KIND(self.size.model), None if self.size.mixed else self.dtype
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def step(self) -> torch.Tensor:
        batch = self.random.choice(self.size.batches)
        length = int(self.scale * self.random.uniform(0.4, 1)) // batch
        batch, length = self.draw(batch, max(length, 2))
        return self.trained(self.tokens(self.size.model.vocabulary, batch, length + 1))

    def trained(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take one step of the optimizer on some sequences; returns the loss."""
        if self.size.mixed:
            with self.autocast():
                loss = next_token_loss(self.model, tokens)
        else:
            loss = next_token_loss(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

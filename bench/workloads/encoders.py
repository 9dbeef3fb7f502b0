"""Encoders: BERT's kind on sequences of many lengths; T5's kind from one text to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from bench.workloads.workload import Workload


@dataclass(frozen=True)
class Encoding:
    """The dimensions of an encoder, or of an encoder and a decoder of as many layers."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    positions: int


@dataclass(frozen=True)
class Learning:
    """Up to `scale` tokens a step, padding included, in sequences of a random length each."""

    model: Encoding
    scale: int
    lengths: tuple[int, int]


BASE = Encoding(30_522, 768, 12, 12, 3072, positions=512)
SMALL = Encoding(32_128, 512, 6, 8, 2048, positions=512)
TINY = Encoding(61, 16, 2, 2, 32, positions=64)


class Bert(nn.Module):
    """Bidirectional; returns the logits of the tokens that `chosen` selects."""

    def __init__(self, of: Encoding) -> None:
        super().__init__()
        self.embedding = nn.Embedding(of.vocabulary, of.width)
        self.positions = nn.Embedding(of.positions, of.width)
        self.norm = nn.LayerNorm(of.width)
        layer = nn.TransformerEncoderLayer(
            of.width, of.heads, of.hidden, 0.1, F.gelu, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, of.layers, enable_nested_tensor=False)
        self.leave = nn.Linear(of.width, of.vocabulary)

    def forward(
        self, tokens: torch.Tensor, padding: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        x = self.norm(self.embedding(tokens) + self.positions.weight[: tokens.shape[1]])
        return self.leave(self.layers(x, src_key_padding_mask=padding)[chosen])


class BertTraining(Workload):
    """Masked tokens are predicted, in mixed precision; a batch is as long as its longest text."""

    SIZES: ClassVar = {
        "full": Learning(BASE, 16_384, (16, 512)),
        "tiny": Learning(TINY, 96, (2, 30)),
    }
    MASKED: ClassVar = 0.15
    size: Learning

    def start(self) -> None:
        self.model = self.built(lambda: Bert(self.size.model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def step(self) -> torch.Tensor:
        low, high = self.size.lengths
        longest = self.random.randint(low, high)
        batch, longest = self.draw(max(2, self.scale // longest), longest)
        lengths = torch.tensor([self.random.randint(low, longest) for _ in range(batch)])
        lengths[0] = longest
        padding = torch.arange(longest) >= lengths[:, None]
        padding = padding.to(self.device)
        tokens = self.tokens(self.size.model.vocabulary, batch, longest)
        drawn = torch.rand(batch, longest, generator=self.generator, device=self.device)
        chosen = (drawn < self.MASKED) & ~padding
        chosen[0, 0] = True
        with self.autocast():
            logits = self.model(tokens.masked_fill(chosen, 0), padding, chosen)
            loss = F.cross_entropy(logits, tokens[chosen])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class T5(nn.Module):
    """An encoder of one text and a causal decoder of the other."""

    def __init__(self, of: Encoding) -> None:
        super().__init__()
        self.embedding = nn.Embedding(of.vocabulary, of.width)
        self.positions = nn.Embedding(of.positions, of.width)
        self.layers = nn.Transformer(
            of.width, of.heads, of.layers, of.layers, of.hidden, batch_first=True
        )

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        x = self.layers(
            self.embedded(source), self.embedded(target), tgt_mask=mask, tgt_is_causal=True
        )
        return F.linear(x, self.embedding.weight)


class T5Training(Workload):
    """Source and target have lengths of their own, in mixed precision."""

    SIZES: ClassVar = {
        "full": Learning(SMALL, 24_576, (24, 512)),
        "tiny": Learning(TINY, 96, (2, 30)),
    }
    size: Learning

    def start(self) -> None:
        self.model = self.built(lambda: T5(self.size.model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def step(self) -> torch.Tensor:
        source, target = (self.random.randint(*self.size.lengths) for _ in "12")
        batch, source, target = self.draw(max(1, self.scale // (source + target)), source, target)
        vocabulary = self.size.model.vocabulary
        read, written = (
            self.tokens(vocabulary, batch, source),
            self.tokens(vocabulary, batch, target),
        )
        with self.autocast():
            logits = self.model(read, written[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), written[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

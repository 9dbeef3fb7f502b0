"""GPT-2 of 124 million parameters: training in mixed precision; generation with a growing cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bench.workloads.language import LanguageTraining, Learning
from bench.workloads.transformer import Cache, Checkpointed, Decoder, Decoding, generate
from bench.workloads.workload import Workload

SMALL = Decoding(50_257, 768, 12, 12, 12, 3072, positions=16_384, llama=False)
TINY = Decoding(61, 16, 2, 2, 2, 32, positions=256, llama=False)


class Training(LanguageTraining):
    SIZES: ClassVar = {
        "full": Learning(SMALL, 8192, (8, 10, 12, 16, 24), mixed=True),
        "tiny": Learning(TINY, 64, (1, 2, 3), mixed=True),
    }


class CheckpointTraining(LanguageTraining):
    """Long sequences, of which only each block's input is kept."""

    KIND = Checkpointed
    SIZES: ClassVar = {
        "full": Learning(SMALL, 32_768, (4, 6, 8, 12, 16), mixed=True),
        "tiny": Learning(TINY, 64, (1, 2, 3), mixed=True),
    }


@dataclass(frozen=True)
class Generating:
    """Up to `scale` sequences at once; prompts of random length, then `count` tokens more."""

    model: Decoding
    scale: int
    prompt: tuple[int, int]
    count: int


class Generation(Workload):
    """A step is one batch of prompts and their continuations."""

    SIZES: ClassVar = {
        "full": Generating(SMALL, 64, (64, 768), 12),
        "tiny": Generating(TINY, 4, (2, 20), 4),
    }
    size: Generating

    def start(self) -> None:
        self.model = self.built(lambda: Decoder(self.size.model), self.dtype)

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        batch = max(1, round(self.scale * self.random.uniform(0.25, 1)))
        batch, length = self.draw(batch, self.random.randint(*self.size.prompt))
        tokens = self.tokens(self.size.model.vocabulary, batch, length)
        cache = Cache(self.size.model.layers)
        return generate(self.model, cache, tokens, self.size.count).float().sum()

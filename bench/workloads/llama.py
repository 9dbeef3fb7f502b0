"""Llama's kind: training; serving of several requests in turn; training as replayed graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bench.workloads import gpt2
from bench.workloads.language import LanguageTraining, Learning
from bench.workloads.transformer import Cache, Decoder, Decoding, generate, next_token_loss
from bench.workloads.workload import Workload

SMALL = Decoding(32_000, 1024, 12, 16, 4, 2816, positions=65_536)
TINY = Decoding(61, 16, 2, 2, 1, 32, positions=256)


class Training(LanguageTraining):
    SIZES: ClassVar = {
        "full": Learning(SMALL, 12_288, (4, 6, 8, 12)),
        "tiny": Learning(TINY, 64, (1, 2, 3)),
    }


@dataclass(frozen=True)
class Handling:
    """Requests of up to `scale` sequences; `live` of them at once, `count` tokens in turn."""

    model: Decoding
    scale: int
    prompt: tuple[int, int]
    live: int
    count: int


class Serving(Workload):
    """A step admits a request, decodes some tokens of each, and ends one at random.

    So caches of many lengths live side by side, each growing by a token at a time.
    """

    SIZES: ClassVar = {
        "full": Handling(SMALL, 32, (64, 2048), 4, 3),
        "tiny": Handling(TINY, 4, (2, 20), 2, 2),
    }
    size: Handling

    def start(self) -> None:
        self.model = self.built(lambda: Decoder(self.size.model), self.dtype)
        self.requests: list[tuple[Cache, torch.Tensor]] = []

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        self.admit()
        self.requests = [self.advanced(*request) for request in self.requests]
        seen = torch.stack([last.float().sum() for _, last in self.requests]).sum()
        if len(self.requests) == self.size.live:
            del self.requests[self.random.randrange(self.size.live)]
        return seen

    def admit(self) -> None:
        batch = max(1, round(self.scale * self.random.uniform(0.25, 1)))
        batch, length = self.draw(batch, self.random.randint(*self.size.prompt))
        cache = Cache(self.size.model.layers)
        prompt = self.tokens(self.size.model.vocabulary, batch, length)
        self.requests.append((cache, self.model(prompt, cache)))

    def advanced(self, cache: Cache, last: torch.Tensor) -> tuple[Cache, torch.Tensor]:
        return cache, generate(self.model, cache, last.argmax(-1), self.size.count)


class Generation(gpt2.Generation):
    """A step is a batch of prompts and their continuations; the cache has a third of the heads."""

    SIZES: ClassVar = {
        "full": gpt2.Generating(SMALL, 48, (64, 1024), 24),
        "tiny": gpt2.Generating(TINY, 4, (2, 20), 4),
    }


@dataclass(frozen=True)
class Rewarding:
    """Up to `scale` sequences of a prompt and `count` tokens more."""

    model: Decoding
    scale: int
    prompt: tuple[int, int]
    count: int
    mixed: bool = False


class GenerateThenTrain(LanguageTraining):
    """A step samples sequences with a growing cache, then trains on them."""

    SIZES: ClassVar = {
        "full": Rewarding(SMALL, 24, (64, 768), 24),
        "tiny": Rewarding(TINY, 4, (2, 20), 4),
    }

    def step(self) -> torch.Tensor:
        batch = max(1, round(self.scale * self.random.uniform(0.25, 1)))
        batch, length = self.draw(batch, self.random.randint(*self.size.prompt))
        tokens = self.tokens(self.size.model.vocabulary, batch, length)
        with torch.inference_mode():
            cache, sampled = Cache(self.size.model.layers), [tokens]
            for _ in range(self.size.count):
                sampled.append(self.model(sampled[-1], cache).argmax(-1))
        return self.trained(torch.cat(sampled, 1))


class GraphTraining(Workload):
    """A step of training of one shape, captured once; each step copies tokens in and replays it."""

    SIZES: ClassVar = {"full": Learning(SMALL, 8192, (8,)), "tiny": Learning(TINY, 64, (2,))}
    WARMUP = 3  # before a capture, as PyTorch asks for: libraries set themselves up
    size: Learning

    def start(self) -> None:
        batch = self.size.batches[0]
        self.shape = (batch, self.scale // batch + 1)
        self.model = self.built(lambda: Decoder(self.size.model), self.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, capturable=True)
        self.input = self.tokens(self.size.model.vocabulary, *self.shape)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARMUP):
                self.train()
        torch.cuda.current_stream().wait_stream(side)
        # As PyTorch's documentation has it: gradients come from the graph's pool, and those of
        # before do not stay in use until the capture frees them.
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.train()

    def train(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = next_token_loss(self.model, self.input)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self) -> torch.Tensor:
        self.draw(*self.shape)
        self.input.copy_(self.tokens(self.size.model.vocabulary, *self.shape))
        self.graph.replay()
        return self.loss.clone()


class CompiledTraining(Workload):
    """A step of training of one shape, with a model that `torch.compile` captures as graphs."""

    SIZES: ClassVar = GraphTraining.SIZES
    WARMUP = 4  # compiles, runs once without a graph, captures, replays
    size: Learning

    def start(self) -> None:
        batch = self.size.batches[0]
        self.shape = (batch, self.scale // batch + 1)
        self.model = self.built(lambda: Decoder(self.size.model), self.dtype)
        self.compiled = torch.compile(self.model, mode="reduce-overhead")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        for _ in range(self.WARMUP):
            self.train()

    def train(self) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        tokens = self.tokens(self.size.model.vocabulary, *self.shape)
        loss = next_token_loss(self.compiled, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self) -> torch.Tensor:
        self.draw(*self.shape)
        return self.train()

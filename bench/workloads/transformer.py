"""Decoders: GPT-2's kind, Llama's kind, and Llama's kind with a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Decoding:
    """The dimensions of a decoder.

    `llama` chooses root mean square norms, rotary positions and gated linear units; without it,
    layer norms, learned positions, biases and GELU. `experts` feed-forward parts instead of one, of
    which each token uses `used`.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    positions: int
    llama: bool = True
    experts: int = 0
    used: int = 2


class Cache:
    """Keys and values of each layer; a token more is a new tensor of all of them."""

    def __init__(self, layers: int) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers

    @property
    def length(self) -> int:
        first = self.layers[0]
        return 0 if first is None else first[0].shape[2]

    def extend(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer; returns all of it."""
        held = self.layers[layer]
        if held is not None:
            keys, values = torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2)
        self.layers[layer] = (keys, values)
        return keys, values


class Rotary(nn.Module):
    """Rotation of halves of each head by an angle that grows with the position."""

    def __init__(self, dimension: int, positions: int) -> None:
        super().__init__()
        rates = 10_000.0 ** -(torch.arange(0, dimension, 2) / dimension)
        angles = torch.outer(torch.arange(positions), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor, begin: int) -> torch.Tensor:
        end = begin + x.shape[2]
        cos, sin = self.cos[begin:end].to(x.dtype), self.sin[begin:end].to(x.dtype)
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Attention(nn.Module):
    """Causal attention; keys and values may have fewer heads than queries."""

    def __init__(self, of: Decoding, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.key_heads = layer, of.heads, of.key_heads
        self.dimension = of.width // of.heads
        keys = of.key_heads * self.dimension
        self.widths = [of.width, keys, keys]
        self.enter = nn.Linear(of.width, of.width + 2 * keys, bias=not of.llama)
        self.leave = nn.Linear(of.width, of.width, bias=not of.llama)
        self.rotary = Rotary(self.dimension, of.positions) if of.llama else None

    def forward(self, x: torch.Tensor, cache: Cache | None, begin: int) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, -1, self.dimension).transpose(1, 2)
            for part in self.enter(x).split(self.widths, -1)
        )
        if self.rotary is not None:
            q, k = self.rotary(q, begin), self.rotary(k, begin)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        if self.key_heads < self.heads:
            shared = self.heads // self.key_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        # One token sees all before it; several are the first, and each sees those up to itself.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return self.leave(y.transpose(1, 2).reshape(batch, length, width))


class Gelu(nn.Sequential):
    def __init__(self, of: Decoding) -> None:
        super().__init__(
            nn.Linear(of.width, of.hidden), nn.GELU("tanh"), nn.Linear(of.hidden, of.width)
        )


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, of: Decoding) -> None:
        super().__init__()
        self.gate = nn.Linear(of.width, of.hidden, bias=False)
        self.up = nn.Linear(of.width, of.hidden, bias=False)
        self.down = nn.Linear(of.hidden, of.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each token goes to the experts that a router chooses, so their batches depend on the data."""

    def __init__(self, of: Decoding) -> None:
        super().__init__()
        self.used = of.used
        self.router = nn.Linear(of.width, of.experts, bias=False)
        self.experts = nn.ModuleList(Gated(of) for _ in range(of.experts))
        self.register_buffer("numbers", torch.arange(of.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1, torch.float32).topk(self.used)
        by_token = chosen.flatten()
        order = by_token.argsort(stable=True)
        counts = (by_token[:, None] == self.numbers).sum(0).tolist()  # the CPU waits for this
        parts = tokens[order // self.used].split(counts)
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        each = made[order.argsort()].view(-1, self.used, tokens.shape[1])
        return (each * shares[..., None].to(each.dtype)).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, of: Decoding, layer: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed = norm(of), norm(of)
        self.attention = Attention(of, layer)
        self.feed = Experts(of) if of.experts else Gated(of) if of.llama else Gelu(of)

    def forward(self, x: torch.Tensor, cache: Cache | None, begin: int) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), cache, begin)
        return x + self.feed(self.before_feed(x))


class Decoder(nn.Module):
    """Tokens in, logits out; the embedding is also the last matrix."""

    def __init__(self, of: Decoding) -> None:
        super().__init__()
        self.of = of
        self.embedding = nn.Embedding(of.vocabulary, of.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = None if of.llama else nn.Embedding(of.positions, of.width)
        self.blocks = nn.ModuleList(Block(of, layer) for layer in range(of.layers))
        self.norm = norm(of)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Return the logits of every position, or with a cache those of the last one."""
        begin = 0 if cache is None else cache.length
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[begin : begin + tokens.shape[1]]
        for block in self.blocks:
            x = self.advanced(block, x, cache, begin)
        x = self.norm(x if cache is None else x[:, -1:])
        return F.linear(x, self.embedding.weight)

    def advanced(
        self, block: nn.Module, x: torch.Tensor, cache: Cache | None, begin: int
    ) -> torch.Tensor:
        return block(x, cache, begin)


class Checkpointed(Decoder):
    """Keeps each block's input alone, and computes the rest again for the backward pass."""

    def advanced(
        self, block: nn.Module, x: torch.Tensor, cache: Cache | None, begin: int
    ) -> torch.Tensor:
        return checkpoint(block, x, cache, begin, use_reentrant=False)


def norm(of: Decoding) -> nn.Module:
    return nn.RMSNorm(of.width, eps=1e-5) if of.llama else nn.LayerNorm(of.width)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def generate(model: Decoder, cache: Cache, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Take the likeliest token `count` times; returns the logits that the last was taken from."""
    for _ in range(count):
        logits = model(tokens, cache)
        tokens = logits.argmax(-1)
    return logits

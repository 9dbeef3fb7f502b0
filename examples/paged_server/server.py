"""A tiny server with paged attention, whose cache of keys and values grows and shrinks.

    python examples/paged_server/server.py [--device cuda:0] [--steps 90]

Sequences come in two waves. Each step makes one token of every running sequence: its key and value
go to a block of the cache, and its query attends to all tokens before it, through a table of
blocks, by PyTorch's scaled_dot_product_attention if PyTorch is there, else by NumPy. There is no
model: queries, keys and values are random numbers.

The cache reserves addresses for far more blocks than there is memory. Blocks of running sequences
have memory, in whole pages. A row has the keys and values of all layers, so that few blocks fill a
page; moves of blocks free the pages that are half empty. The tensor that attention reads is made
once, before anything is committed.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from block_pool import BlockPool

import gpumem

LAYERS, HEADS, WIDTH = 2, 8, 64
TOKENS = 16  # of a block
MAX_BLOCKS = 1 << 16  # 8 GiB of addresses
MIB = 1 << 20

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


class Cache:
    """Keys and values of every layer, in blocks."""

    def __init__(self, arena: gpumem.Arena) -> None:
        shape = (MAX_BLOCKS, 2 * LAYERS, TOKENS, HEADS, WIDTH)
        tensor = arena.virtual(shape, "float32", step=1)
        self.pool = BlockPool(tensor)
        self.rows: Any = tensor.full.numpy() if torch is None else torch.from_dlpack(tensor.full)

    def array(self, values: np.ndarray) -> Any:
        """Return it as the cache's tensors are: of PyTorch and on their device, or of NumPy."""
        return values if torch is None else torch.from_numpy(values).to(self.rows.device)

    def attend(self, layer: int, query: Any, table: list[int], length: int) -> Any:
        """Return the attention of a query of shape (heads, width) over a sequence."""
        keys, values = (
            self.rows[table, number].reshape(-1, HEADS, WIDTH)[:length]
            for number in (2 * layer, 2 * layer + 1)
        )
        if torch is not None:
            query, keys, values = query[:, None], keys.transpose(0, 1), values.transpose(0, 1)
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(query[None], keys[None], values[None])[0, :, 0]
        scores = np.einsum("hw,thw->ht", query, keys) / np.sqrt(np.float32(WIDTH))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.einsum("ht,thw->hw", weights / weights.sum(axis=1, keepdims=True), values)


class Sequence:
    """A request: its table of blocks, and, for the check, its keys and values in one piece."""

    def __init__(self, cache: Cache, prompt: int, output: int, rng: np.random.Generator) -> None:
        self.cache, self.left, self.rng, self.length = cache, output, rng, 0
        self.table = cache.pool.allocate(-(-prompt // TOKENS)).tolist()
        self.seen: list[list[np.ndarray]] = [[] for _ in range(2 * LAYERS)]
        for _ in range(prompt):
            self.append()

    def append(self) -> None:
        """Write the key and the value of one more token of each layer."""
        if self.length == len(self.table) * TOKENS:
            self.table += self.cache.pool.allocate(1, near=self.table).tolist()
        block, place = self.table[self.length // TOKENS], self.length % TOKENS
        for number in range(2 * LAYERS):
            value = self.rng.standard_normal((HEADS, WIDTH), np.float32)
            self.cache.rows[block, number, place] = self.cache.array(value)
            self.seen[number].append(value)
        self.length += 1

    def step(self) -> float:
        """Make one token; returns how far attention is from that over contiguous memory."""
        self.append()
        self.left -= 1
        worst = 0.0
        for layer in range(LAYERS):
            query = self.rng.standard_normal((HEADS, WIDTH), np.float32)
            found = self.cache.attend(layer, self.cache.array(query), self.table, self.length)
            keys, values = (np.stack(self.seen[2 * layer + i]) for i in range(2))
            scores = np.exp(np.einsum("hw,thw->ht", query, keys) / np.sqrt(WIDTH))
            wanted = np.einsum("ht,thw->hw", scores / scores.sum(1, keepdims=True), values)
            found = found if torch is None else found.cpu().numpy()
            worst = max(worst, float(np.abs(found - wanted).max()))
        return worst


def compact(cache: Cache, running: list[Sequence]) -> int:
    """Move blocks out of half empty pages, where more than a tenth of the memory is wasted."""
    if cache.pool.tensor.held_nbytes <= 1.1 * cache.pool.floor_nbytes:
        return 0

    def copy(origins: np.ndarray, targets: np.ndarray) -> None:
        cache.rows[targets] = cache.rows[origins]

    moved = cache.pool.compact(copy)
    for sequence in running:
        sequence.table = [moved.get(block, block) for block in sequence.table]
    return len(moved)


def main() -> None:
    """Serve two waves, and print how much memory the cache holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="host")
    parser.add_argument("--steps", type=int, default=90)
    options = parser.parse_args()
    arena = gpumem.Arena(options.device)
    cache = Cache(arena)
    rng = np.random.default_rng(7)
    running: list[Sequence] = []
    worst, peak, moves = 0.0, 0, 0
    for step in range(options.steps):
        if step % (options.steps // 2) < 12:  # two waves
            prompt, output = (int(n) for n in rng.integers(60, 300, 2))
            running.append(Sequence(cache, prompt, min(output, 30), rng))
        worst = max(worst, *(sequence.step() for sequence in running), 0.0)
        for sequence in running:
            if sequence.left == 0:
                cache.pool.free(sequence.table)
        running = [sequence for sequence in running if sequence.left]
        moves += compact(cache, running)
        peak = max(peak, cache.pool.tensor.held_nbytes)
        if step % 15 == 14:
            print(
                f"step {step + 1}: {len(running)} sequences, {cache.pool.live} blocks, "
                f"{cache.pool.tensor.held_nbytes // MIB} MiB held"
            )
    for sequence in running:
        cache.pool.free(sequence.table)
    arena.shrink()
    reserved = cache.pool.tensor.full.nbytes
    print(f"{reserved // MIB} MiB of addresses, {peak // MIB} MiB held at most, {moves} moves")
    print(f"attention differs from contiguous memory's by less than 1e-4: {worst < 1e-4}")
    print(f"at the end {cache.pool.tensor.held_nbytes} bytes held")


if __name__ == "__main__":
    main()

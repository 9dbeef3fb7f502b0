"""One process trains, serves and trains on, under one limit that two halves could not keep.

    python examples/one_limit.py [--device cuda:0] [--mib 24]

Training needs weights and the optimizer's state, twice as large; serving needs the weights and a
cache that grows with its requests. Each phase needs more than half of the limit. The optimizer
sleeps while the cache is there, and the cache's memory goes before the optimizer wakes; every
address stays. PyTorch computes where it is there, on a GPU or the CPU, else NumPy.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import gpumem

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

MIB = 1 << 20
RATE, BETA, DECAY = 0.01, 0.9, 0.999


class Model:
    """Weights that Adam brings nearer to a target: a model small enough to check."""

    def __init__(self, arena: gpumem.Arena, nbytes: int) -> None:
        self.step, count = 0, nbytes // 4
        with arena.tag("weights"):
            self.weights = gpumem.empty(count, "float32", resource=arena)
        with arena.tag("optimizer"):
            self.state = gpumem.empty((2, count), "float32", resource=arena)
        gpumem.copy(self.weights, np.zeros(count, np.float32))
        gpumem.copy(self.state, np.zeros((2, count), np.float32))

    def train(self, steps: int) -> None:
        """Take Adam's steps towards a weight of 1."""
        weights, state = as_array(self.weights), as_array(self.state)
        for _ in range(steps):
            self.step += 1
            gradient = weights - 1
            state[0] = BETA * state[0] + (1 - BETA) * gradient
            state[1] = DECAY * state[1] + (1 - DECAY) * gradient**2
            mean, square = state[0] / (1 - BETA**self.step), state[1] / (1 - DECAY**self.step)
            weights -= RATE * mean / (square**0.5 + 1e-8)

    def loss(self) -> float:
        """Return how far the weights are from the target."""
        return float(((as_array(self.weights) - 1) ** 2).mean())


def as_array(tensor: Any) -> Any:
    """Return PyTorch's or NumPy's view of the memory."""
    return np.from_dlpack(tensor) if torch is None else torch.from_dlpack(tensor)


def serve(arena: gpumem.Arena, model: Model, rows: int, nbytes: int) -> tuple[float, int]:
    """Answer requests, each of which adds a row to a cache.

    Returns what the last one reads, and the bytes held then.
    """
    with arena.tag("cache", asleep="drop"):
        cache = arena.virtual((4 * rows, nbytes // 4), "float32", step=1)
    mean = float(as_array(model.weights).mean())
    for row in range(rows):
        cache.commit(row + 1)
        as_array(cache.tensor(row, row + 1))[:] = mean
    answer = float(as_array(cache.tensor(0, rows))[:, 0].sum())
    held = arena.stats().reserved
    cache.close()  # its memory goes once the queued work is done
    return answer, held


def program(arena: gpumem.Arena, nbytes: int, *, sleeps: bool) -> tuple[list[list[str]], Model]:
    """Train, serve and train on; return a row for each phase."""
    table, model = [], Model(arena, nbytes)

    def note(phase: str, held: int, what: str) -> None:
        table.append([phase, f"{held / MIB:.0f}", ", ".join(arena.asleep) or "-", what])

    model.train(10)
    note("train", arena.stats().reserved, f"loss {model.loss():.4f}")
    if sleeps:
        arena.sleep("optimizer")
    answer, held = serve(arena, model, 5, nbytes // 2)
    note("serve", held, f"answer {answer:.4f}")
    if sleeps:
        arena.wake("optimizer")
    model.train(10)
    note("train on", arena.stats().reserved, f"loss {model.loss():.4f}")
    return table, model


def main() -> None:
    """Run the program, with sleep under a limit and without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=None, help="cuda:0 if there is one, else host")
    parser.add_argument("--mib", type=int, default=24, help="bytes of the weights in MiB")
    given = parser.parse_args()
    device = given.device or ("cuda:0" if gpumem.driver_status().available else "host")
    if device.startswith("cuda") and torch is None:
        parser.error("on a GPU this example needs PyTorch")
    nbytes = given.mib * MIB
    limit = 4 * nbytes
    arena = gpumem.Arena(device, max_mem=limit)
    table, model = program(arena, nbytes, sleeps=True)
    widths = (9, 9, 10, 0)
    for row in [["phase", "held MiB", "asleep", "result"], *table]:
        print(" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    reference, same = program(gpumem.Arena(device), nbytes, sleeps=False)
    print(f"as with memory for everything at once: {table[-1][-1] == reference[-1][-1]}")
    del model, same
    print(f"the limit is {limit // MIB} MiB; neither phase fits in half of it")


if __name__ == "__main__":
    main()

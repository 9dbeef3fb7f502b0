"""A serving trace: arrivals, prompts, outputs; written by this file, read by the tests and a bench.

    python -m kv.serving_trace, run in tests/, writes serving_trace.csv again, byte by byte.

The load has two waves with a quiet time in between, as of a day. A request arrives at a step of
decoding, brings a prompt, of which the first tokens may be a prefix that others have too, and
leaves after its output. One step makes one token of every running request.
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from typing import NamedTuple

SEED = 20261123
REQUESTS = 600
STEPS = 3000  # over which they arrive
LAYERS = 4  # keys and values each: 8 tensors
BLOCK_TOKENS = 16
TOKEN_BYTES = 2048  # of one layer's keys: 8 heads of 128 numbers of 2 bytes
PREFIXES = (0, 96, 256, 640)  # tokens; number 0: none
FILE = Path(__file__).with_suffix(".csv")


class Request(NamedTuple):
    """One line of the trace; tokens."""

    arrival: int
    prompt: int
    output: int
    prefix: int


def generate() -> list[Request]:
    rng = random.Random(SEED)
    requests = []
    for _ in range(REQUESTS):
        while True:
            at = rng.random()
            # Two waves: the load in the quiet time is a tenth of that in a wave.
            if rng.random() < 0.1 + 0.9 * math.sin(2 * math.pi * at) ** 2:
                break
        prefix = rng.choices(range(len(PREFIXES)), (5, 2, 2, 1))[0]
        prompt = PREFIXES[prefix] + min(4000, max(8, round(rng.lognormvariate(5.6, 1.0))))
        output = min(1500, max(4, round(rng.lognormvariate(4.8, 0.8))))
        requests.append(Request(round(at * STEPS), prompt, output, prefix))
    return sorted(requests)


def load() -> list[Request]:
    with FILE.open(newline="") as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    return [Request(*map(int, row)) for row in rows[1:]]


def text() -> str:
    lines = [
        f"# seed {SEED}; {LAYERS} layers, keys and values; {BLOCK_TOKENS} tokens a block, "
        f"{TOKEN_BYTES} bytes a token and tensor; prefixes of {PREFIXES[1:]} tokens",
        ",".join(Request._fields),
        *(",".join(map(str, request)) for request in generate()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

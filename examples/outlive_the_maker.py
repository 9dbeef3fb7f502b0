"""Tensors that outlive their process: a program seals them and is killed, another one uses them.

Runs anywhere; on a machine with a GPU the set can lie in GPU memory just as well:

    python examples/outlive_the_maker.py
    python examples/outlive_the_maker.py cuda:0
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import gpumem
from gpumem import interop

NAME = f"example-{os.getpid()}"
LAYERS = 4
WIDTH = 256


def make(name: str, memory: str) -> None:
    """Seal the weights of a small network, and end as a program that crashes does."""
    forms = {f"layer{number}": ((WIDTH, WIDTH), "float32") for number in range(LAYERS)}
    with interop.seal(name, forms, memory=memory) as empty:
        for number, tensor in enumerate(empty.values()):
            tensor.fill(number + 1)
    os.kill(os.getpid(), signal.SIGKILL)


def main(memory: str) -> int:
    """Run the maker to its end, then use its weights here without loading them."""
    maker = subprocess.run([sys.executable, __file__, memory, NAME], check=False)
    with interop.open(NAME) as weights:
        first = [gpumem.asarray(each[0, :1], "host").item() for each in weights.values()]
        print(f"the maker ended with {maker.returncode}; {len(weights)} tensors: {first}")
    interop.drop(NAME)
    return int(first != [1.0, 2.0, 3.0, 4.0])


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "host"
    sys.exit(make(sys.argv[2], where) if len(sys.argv) > 2 else main(where))

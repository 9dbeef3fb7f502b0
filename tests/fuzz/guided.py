"""Search one target guided by coverage of gpumem's Python code; needs the package atheris.

``python -m tests.fuzz.guided TARGET [options of libFuzzer]`` ends at the first failure, and prints
where it wrote the input. The corpus and the changes are those of `tests.fuzz`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import warnings

import atheris

from . import targets
from .mutation import MOST_BYTES, mutate


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ.update(targets.ENVIRONMENT)
    _, name, *options = sys.argv
    with atheris.instrument_imports(include=["gpumem"]):
        target = targets.load(name)

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except target.accepts:
            return

    def changed(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        change = rng.choice((mutate, *target.structured))
        return change(rng, data, data)[:most]

    with tempfile.TemporaryDirectory() as found:
        seeds = str(targets.CORPUS / name)
        arguments = [sys.argv[0], f"-max_len={MOST_BYTES}", *options, found, seeds]
        atheris.Setup(arguments, run, custom_mutator=changed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

"""What reads inputs: a target for each reader, in the module named after its folder of gpumem."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..changes import Change

NAMES = {
    "recording": "traces",
    "npz": "traces",
    "torch_snapshot": "traces",
    "rmm_log": "traces",
    "snapshot": "traces",
    "onnx_model": "planning",
    "statistics": "planning",
    "handle": "interop",
    "timeline": "interop",
    "settings": "settings",
    "environment": "settings",
    "page": "observe",
    "command": "cli",
}
"""Name of each target, and the module that makes it."""

PLANTED = "planted"
"""A target with faults, by which the fuzzer itself is tested."""

CORPUS = Path(__file__).parents[1] / "corpus"
# A small host device, and nothing that reaches a GPU's multicast.
ENVIRONMENT = {
    "GPUMEM_HOST_CAPACITY": str(256 << 20),
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes
    ----------
    run
        Reads an input, uses what comes out, and returns what tells two good inputs apart.
    accepts
        The errors that are documented.
    one_line, max_characters
        Whether each message is one printable line, and its length.
    structured, tokens
        Changes that keep an input readable; words of the format.
    max_rss
        Bytes by which an input may let the process grow, besides some for each of its bytes.
    limit_address_space
        Whether a gigabyte of addresses is enough for any input.
    alive
        What is counted before and after repetitions.
    rounds
        Repetitions in each round of the search for a leak.
    """

    name: str
    run: Callable[[bytes], object]
    accepts: tuple[type[Exception], ...]
    one_line: bool = True
    max_characters: int = 1000
    structured: tuple[Change, ...] = ()
    tokens: tuple[bytes, ...] = ()
    max_rss: int = 48 << 20
    limit_address_space: bool = True
    alive: Callable[[], Any] = lambda: None
    rounds: tuple[int, ...] = (8, 8, 80, 400)


def load(name: str) -> Target:
    """Make a target by name."""
    module = importlib.import_module(f"{__name__}.{NAMES.get(name, name)}")
    made: dict[str, Target] = {each.name: each for each in module.TARGETS}
    return made[name]

"""The C functions that PyTorch calls, and their settings: to be called without PyTorch."""

from gpumem.integrations.torch._hooks import (
    NAMES,
    PINNED,
    addresses,
    arenas,
    counts,
    introduce,
    reset_peak,
    serve,
    set_finder,
    table,
)
from gpumem.integrations.torch._messages import out_of_memory as out_of_memory_text

__all__ = [
    "NAMES",
    "PINNED",
    "addresses",
    "arenas",
    "counts",
    "introduce",
    "out_of_memory_text",
    "reset_peak",
    "serve",
    "set_finder",
    "table",
]

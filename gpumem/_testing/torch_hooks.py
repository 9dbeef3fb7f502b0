"""The C functions that PyTorch calls, and their settings: to be called without PyTorch."""

from gpumem.integrations.torch._allocator import adopt_allocator
from gpumem.integrations.torch._errors import out_of_memory as out_of_memory_text
from gpumem.integrations.torch._hooks import (
    NAMES,
    addresses,
    arenas,
    counts,
    introduce,
    reset_peak,
    serve,
    set_finder,
    set_thrower,
)

__all__ = [
    "NAMES",
    "addresses",
    "adopt_allocator",
    "arenas",
    "counts",
    "introduce",
    "out_of_memory_text",
    "reset_peak",
    "serve",
    "set_finder",
    "set_thrower",
]

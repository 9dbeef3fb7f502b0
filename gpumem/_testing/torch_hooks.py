"""The C functions that PyTorch calls, and their settings, for calls without PyTorch."""

from gpumem.integrations.torch._hooks import (
    PINNED,
    arenas,
    introduce,
    segment_functions,
    serve,
    set_finder,
    table,
)
from gpumem.integrations.torch._messages import out_of_memory as out_of_memory_text

__all__ = [
    "PINNED",
    "arenas",
    "introduce",
    "out_of_memory_text",
    "segment_functions",
    "serve",
    "set_finder",
    "table",
]

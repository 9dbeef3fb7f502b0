"""Functions that lower modules call and higher modules provide.

`MemoryResource.snapshot` is an example: its result comes from `gpumem.observe`, which is built on
resources. The package registers such functions while it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["provide", "provided"]

_functions: dict[str, Callable[..., Any]] = {}


def provide(**functions: Callable[..., Any]) -> None:
    """Register functions by the names under which lower modules call them."""
    _functions.update(functions)


def provided(name: str) -> Callable[..., Any]:
    """Return the function that is registered under a name."""
    return _functions[name]

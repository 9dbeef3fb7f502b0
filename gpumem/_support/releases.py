"""Functions that release unreferenced memory, in the order in which one frees another."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["on_release", "release_retired"]

# Finished copies release their ends; an import may hold a pool, and a callback an arena; an
# arena may hold imports, so these come once more at the end.
PHASES = ("copies", "imports", "callbacks", "arenas", "timelines")
AGAIN = ("imports",)

_functions: dict[str, list[Callable[[], None]]] = {phase: [] for phase in PHASES}


def on_release(phase: str, function: Callable[[], None]) -> None:
    """Register a function of one of the `PHASES`; within a phase the latest runs first."""
    _functions[phase].insert(0, function)


def release_retired() -> None:
    """Run every phase: what is free afterwards is free for the driver."""
    for phase in (*PHASES, *AGAIN):
        for function in _functions[phase]:
            function()

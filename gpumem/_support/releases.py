"""Functions that release unreferenced memory, in the order in which one frees another."""

from __future__ import annotations

from collections.abc import Callable

# Completed copies release their ends; an import may hold a pool, and a callback an arena; an arena
# may hold imports, so these run once more at the end.
PHASES = ("copies", "imports", "callbacks", "arenas", "timelines")
AGAIN = ("imports",)

_functions: dict[str, list[Callable[[bool], None]]] = {phase: [] for phase in PHASES}


def on_release(phase: str, function: Callable[[bool], None]) -> None:
    """Register a function of one of the `PHASES`; within a phase the latest runs first.

    Its argument says whether it may wait, for the device or for other threads.
    """
    _functions[phase].insert(0, function)


def release_retired(may_wait: bool = True) -> None:
    """Run every phase, which releases unreferenced memory to the driver.

    Memory that cannot be released without a wait is left for a call that may wait, unless this may.
    """
    for phase in (*PHASES, *AGAIN):
        for function in _functions[phase]:
            function(may_wait)

"""An arena under a budget whose callback gives the budget back what a test kept for that."""

from __future__ import annotations

import gpumem


def arena_that_gives_way(limit: int) -> tuple[gpumem.Arena, list[gpumem.Buffer], list[int]]:
    """Return the arena, the list of buffers to give back, and what was asked for, in bytes."""
    kept: list[gpumem.Buffer] = []
    asked: list[int] = []

    def drop(budget: gpumem.Budget, nbytes: int) -> None:
        asked.append(nbytes)
        while kept:
            kept.pop().close()
        arena.shrink()

    budget = gpumem.Budget(limit, on_pressure=drop)
    arena = gpumem.Arena("host", {"oom_wait_ms": 0}, budget=budget)
    return arena, kept, asked

"""An arena under a budget with a pressure callback that frees buffers of a test."""

from __future__ import annotations

import gpumem


def arena_that_releases_under_pressure(
    limit: int,
) -> tuple[gpumem.Arena, list[gpumem.Buffer], list[int]]:
    """Return the arena, the list of buffers to free, and the bytes that each call requested."""
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

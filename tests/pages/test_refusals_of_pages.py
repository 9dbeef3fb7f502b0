"""Requests below a limit while work is queued through idle pages, so that none is released."""

from __future__ import annotations

import random

import pytest
from helpers.driver import HostDriver

import gpumem

MIB = 1 << 20
LARGEST = 32 * MIB  # page


@pytest.mark.parametrize(
    ("sizes", "seed"),
    [
        ([36, 144, 144, 387, 387, 281, 562], 5),
        ([36, 144, 144, 387, 387, 281, 562], 109),
        ([5, 9, 36, 71, 144, 387, 562, 281], 4),
    ],
)
def test_request_is_met_where_idle_pages_are_larger_than_gaps_of_the_cheapest_place(
    make_arena, stream, sizes, seed
):
    """A request that is refused needs more than lies in whole pages, to one page."""
    arena = make_arena(
        {"backing": "virtual", "max_mem": 20_000 * MIB, "oom_wait_ms": 0, "oom_collect_ms": 0}
        | {"page_move_threshold": 0, "page_move_budget": 1}
    )
    rng, live, lacks = random.Random(seed), [], []
    for _ in range(8):
        with HostDriver().block(stream):
            for _ in range(200):
                if live and rng.random() < 0.42:
                    live.pop(rng.randrange(len(live))).close()
                    continue
                nbytes = rng.choice(sizes) * MIB
                try:
                    live.append(arena.allocate(nbytes, stream))
                except gpumem.OutOfMemoryError as error:
                    lacks.append(nbytes + LARGEST - error.report.movable)
                    live.pop(rng.randrange(len(live))).close()
            arena.check_invariants()
        stream.synchronize()
    assert min(lacks) > 0, f"{seed = }"
    while live:
        live.pop().close()

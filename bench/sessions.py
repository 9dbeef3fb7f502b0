"""Outputs in memory that the CPU can access, compared with outputs that are copied to it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import gpumem
from bench.harness import Timing, interleave

LENGTH = 1 << 20  # float32 elements: 4 MiB


def outputs() -> Timing:
    """Run a session that fills 4 MiB and read one element: through a view, and after a copy."""
    device = gpumem.default_device()
    return interleave(
        {
            "outputs copied": runner(device, None),
            "outputs host-accessible": runner(device, f"{device}/host_accessible"),
        },
        "outputs copied",
    )


def runner(device: gpumem.Device, memory: str | None) -> Callable[[], object]:
    """Make the work of one candidate; without `memory` the output is copied to an array."""
    session = gpumem.Session(device)
    zeros = gpumem.zeros(LENGTH, "f4", memory=device)
    session.bind_output("y", memory)
    array = np.empty(LENGTH, "f4")

    def work(ctx: gpumem.RunContext) -> None:
        gpumem.copy(ctx.output("y", LENGTH, "f4"), zeros, ctx.stream)

    def through_a_view() -> float:
        session.run(work)
        return float(session.outputs()["y"].numpy()[-1])

    def after_a_copy() -> float:
        session.run(work)
        gpumem.copy(array, session.outputs()["y"])
        return float(array[-1])

    return through_a_view if memory else after_a_copy

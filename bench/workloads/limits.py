"""The largest scale of a workload that fits under a limit of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.workloads.allocators import is_exhaustion
from bench.workloads.workload import Run


def largest_that_fits(fits: Callable[[int], bool], first: int, resolution: float = 0.0025) -> int:
    """Search by doubling from `first`, then by halves of what is left; 0 if nothing fits.

    Stops when the answer is known to `resolution` of itself, or to one. `fits` is taken to hold up
    to some scale and not above.
    """
    below, above = 0, first
    while fits(above):
        below, above = above, 2 * above
    while above - below > max(1, int(resolution * below)):
        middle = (below + above) // 2
        if fits(middle):
            below = middle
        else:
            above = middle
    return below


def largest_scale(
    name: str, size: str, device: torch.device, *, seed: int, steps: int, first: int
) -> int:
    """Search the largest scale at which `steps` steps of a workload find their memory."""

    def fits(scale: int) -> bool:
        run = Run()
        try:
            run.begin(name, size, device, seed, scale)
            for _ in range(steps):
                run.step()
        except (RuntimeError, MemoryError) as error:
            if not is_exhaustion(error):
                raise
            exhausted = True
        else:
            exhausted = False
        # Only here the error is gone, and with it the frames that held the step's tensors.
        run.end()
        return not exhausted

    return largest_that_fits(fits, first)

"""What the host devices have given out and not yet taken back."""

from __future__ import annotations

import gc

import gpumem
from gpumem._support.releases import release_retired
from gpumem._testing import host_device


def given_out() -> dict[str, int]:
    """Count it by kind, without the workers of streams: they are kept, and end when idle."""
    return {name: count for name, count in host_device.live().items() if name != "workers"}


def bring_to_rest() -> None:
    """Let go of what only cycles and unfinished work keep: earlier tests leave some of either.

    Imports and timelines too, which a stream used when they were dropped.
    """
    gc.collect()
    gpumem.Device("host").synchronize()  # an arena whose end failed stays until such a wait
    release_retired()
    gpumem.Device("host").synchronize()  # what goes back in stream order

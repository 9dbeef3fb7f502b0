"""Counts of what the host devices hold, and a wait for releases that are unfinished."""

from __future__ import annotations

import gc

import gpumem
from gpumem._support.releases import release_retired
from gpumem._testing import host_device


def held_by_kind() -> dict[str, int]:
    """Count it by kind, without the workers of streams, which the host device keeps until idle."""
    return {name: count for name, count in host_device.live().items() if name != "workers"}


def quiesce() -> None:
    """Release objects that only cycles and unfinished work keep: earlier tests leave some.

    Imports and timelines are among them, if a stream used them when they were dropped.
    """
    gc.collect()
    gpumem.Device("host").synchronize()  # an arena whose end failed stays until such a wait
    release_retired()
    gpumem.Device("host").synchronize()  # memory that is freed in stream order

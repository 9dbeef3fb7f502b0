"""The state of resources at one moment: blocks as columns, differences, JSON, PyTorch's form."""

from gpumem.observe.snapshots.resources import Block, Region, ResourceSnapshot
from gpumem.observe.snapshots.snapshot import SCHEMA, Snapshot, SnapshotDiff, snapshot

__all__ = [
    "SCHEMA",
    "Block",
    "Region",
    "ResourceSnapshot",
    "Snapshot",
    "SnapshotDiff",
    "snapshot",
]

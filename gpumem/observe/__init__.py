"""Shows what memory is used for: events as they happen, and the state at one moment.

`record` writes every allocation, free, growth and failure of one resource or of all into a ring or
a file, which `read` and ``gpumem replay`` can read; `tag` names the purpose of allocations.
`write_report` shows a recorded run as a page of HTML. `snapshot` returns every region and block as
they are now.

`publish` shows the counters of this process to ``gpumem top``, `LivePage` reads those of other
processes, and `prometheus_text` writes them for Prometheus.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpumem.observe.events import AllocationEvent, Events, Frame, RecordedResource, read
from gpumem.observe.live import LiveBudget, LivePage, LiveResource, Publication, publish
from gpumem.observe.prometheus import prometheus_text
from gpumem.observe.recording import Recording, record, tag
from gpumem.observe.snapshots import (
    Block,
    Region,
    ResourceSnapshot,
    Snapshot,
    SnapshotDiff,
    snapshot,
)

if TYPE_CHECKING:
    from gpumem.report import Report, write_report

__all__ = [
    "AllocationEvent",
    "Block",
    "Events",
    "Frame",
    "LiveBudget",
    "LivePage",
    "LiveResource",
    "Publication",
    "RecordedResource",
    "Recording",
    "Region",
    "Report",
    "ResourceSnapshot",
    "Snapshot",
    "SnapshotDiff",
    "prometheus_text",
    "publish",
    "read",
    "record",
    "snapshot",
    "tag",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import the report when one of its names is first used."""
    if name in ("Report", "write_report"):
        return getattr(import_module("gpumem.report"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

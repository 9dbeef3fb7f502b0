"""Shows what memory is used for: events as they happen, and the state at one moment.

`record` writes every allocation, free, growth and failure of one resource or of all into a ring or
a file, which `read` and ``gpumem replay`` can read; `tag` labels allocations, and `phase` says what
the program does meanwhile.
`write_report` shows a recorded run as a page of HTML. `snapshot` returns every region and block as
they are now.

`publish` shows the counters of this process to ``gpumem top``, `LivePage` reads those of other
processes, and `prometheus_text` writes them for Prometheus.
"""

from gpumem._buffer.holders import held_by
from gpumem._events.events import AllocationEvent, Block, Events, Frame, RecordedResource, read
from gpumem._events.labels import phase, tag
from gpumem._snapshots.resources import Region, ResourceSnapshot
from gpumem._snapshots.snapshot import Snapshot, SnapshotDiff, snapshot
from gpumem._support.signatures import published
from gpumem.observe.live import LiveBudget, LivePage, LiveResource, Publication, publish
from gpumem.observe.prometheus import prometheus_text
from gpumem.observe.recording import Recording, record
from gpumem.report import Change, Peak, Report, peak, write_report

__all__ = [
    "AllocationEvent",
    "Block",
    "Change",
    "Events",
    "Frame",
    "LiveBudget",
    "LivePage",
    "LiveResource",
    "Peak",
    "Publication",
    "RecordedResource",
    "Recording",
    "Region",
    "Report",
    "ResourceSnapshot",
    "Snapshot",
    "SnapshotDiff",
    "held_by",
    "peak",
    "phase",
    "prometheus_text",
    "publish",
    "read",
    "record",
    "snapshot",
    "tag",
    "write_report",
]
__dir__ = published(globals())

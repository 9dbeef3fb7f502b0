"""See what memory is used for: events as they happen, and the state at one moment.

`record` writes every allocation, free, growth and failure of one resource or of all into a ring or
a file, which `read` and ``gpumem replay`` understand; `tag` names what they are for. `write_report`
shows a recorded run as a page of HTML. `snapshot` shows every region and block as they are now.

`publish` shows the counters of this process to ``gpumem top``, `published` and `page_of` read those
of others; `prometheus_text` writes them for Prometheus.
"""

from gpumem.errors import NotPublishedError
from gpumem.observe.events import (
    AllocationEvent,
    EventFileError,
    Events,
    Frame,
    RecordedResource,
    read,
)
from gpumem.observe.live import (
    LiveBudget,
    LivePage,
    LiveResource,
    page_of,
    publish,
    published,
    unpublish,
)
from gpumem.observe.prometheus import CONTENT_TYPE, prometheus_text
from gpumem.observe.recording import Recording, record, tag
from gpumem.observe.report import Report, write_report
from gpumem.observe.resources import Block, Region, ResourceSnapshot
from gpumem.observe.snapshots import Snapshot, SnapshotDiff, SnapshotError, snapshot

__all__ = [
    "CONTENT_TYPE",
    "AllocationEvent",
    "Block",
    "EventFileError",
    "Events",
    "Frame",
    "LiveBudget",
    "LivePage",
    "LiveResource",
    "NotPublishedError",
    "RecordedResource",
    "Recording",
    "Region",
    "Report",
    "ResourceSnapshot",
    "Snapshot",
    "SnapshotDiff",
    "SnapshotError",
    "page_of",
    "prometheus_text",
    "publish",
    "published",
    "read",
    "record",
    "snapshot",
    "tag",
    "unpublish",
    "write_report",
]

"""See what memory is used for: events as they happen, and the state at one moment.

`record` writes every allocation, free, growth and failure of one resource or of all into a ring or
a file, which `read` and ``gpumem replay`` understand; `tag` names what they are for. `write_report`
shows a recorded run as a page of HTML. `snapshot` shows every region and block as they are now.
"""

from gpumem.observe.events import (
    Event,
    EventFileError,
    Events,
    Frame,
    RecordedResource,
    read,
)
from gpumem.observe.recording import Recording, record, tag
from gpumem.observe.report import Report, write_report
from gpumem.observe.resources import Block, Region, ResourceSnapshot
from gpumem.observe.snapshots import Snapshot, SnapshotDiff, SnapshotError, snapshot

__all__ = [
    "Block",
    "Event",
    "EventFileError",
    "Events",
    "Frame",
    "RecordedResource",
    "Recording",
    "Region",
    "Report",
    "ResourceSnapshot",
    "Snapshot",
    "SnapshotDiff",
    "SnapshotError",
    "read",
    "record",
    "snapshot",
    "tag",
    "write_report",
]

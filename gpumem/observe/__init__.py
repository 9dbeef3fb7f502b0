"""See what memory is used for: events as they happen, and the state at one moment.

`record` writes every allocation, free, growth and failure of one resource or of all into a ring or
a file, which `read` and ``gpumem replay`` understand; `tag` names what they are for.
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

__all__ = [
    "Event",
    "EventFileError",
    "Events",
    "Frame",
    "RecordedResource",
    "Recording",
    "read",
    "record",
    "tag",
]

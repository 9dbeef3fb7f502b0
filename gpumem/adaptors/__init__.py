"""Adaptors: resources around other resources, in any nesting.

Each allocates its upstream's blocks under its own name: a buffer's `resource` is the outermost
adaptor, and its free goes through all of them, also when a view of it is dropped on a thread that
does not run Python. An adaptor does not own its upstream: closing the adaptor leaves the upstream
open, and the upstream cannot be closed while blocks of the adaptor live.

Each adaptor has a short name: `limit` is `LimitAdaptor`, `log` is `LogAdaptor`, and so on.

>>> import gpumem
>>> tracked = gpumem.adaptors.track(gpumem.adaptors.limit(gpumem.Arena("host"), 1 << 20))
>>> with tracked.allocate(1000) as buffer:
...     buffer.resource is tracked, tracked.counts().current_bytes
(True, 1000)
"""

from __future__ import annotations

from gpumem._support.signatures import published
from gpumem.adaptors.annotations import AnnotateAdaptor, annotate
from gpumem.adaptors.failures import FailureAdaptor, on_failure
from gpumem.adaptors.fallbacks import FallbackAdaptor, fallback
from gpumem.adaptors.limits import LimitAdaptor, limit
from gpumem.adaptors.logs import LogAdaptor, MemoryEvent, log
from gpumem.adaptors.tracking import TrackAdaptor, TrackCounts, track

__all__ = [
    "AnnotateAdaptor",
    "FailureAdaptor",
    "FallbackAdaptor",
    "LimitAdaptor",
    "LogAdaptor",
    "MemoryEvent",
    "TrackAdaptor",
    "TrackCounts",
    "annotate",
    "fallback",
    "limit",
    "log",
    "on_failure",
    "track",
]
__dir__ = published(globals())

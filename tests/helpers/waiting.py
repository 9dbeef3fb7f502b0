"""Wait for what other threads and processes do, by what can be seen of them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

WAITERS = slice(68, 72)  # of a page, as timeline_page.h lays it out


def wait_until(condition: Callable[[], Any], patience_s: float = 60) -> None:
    """Wait until it holds; other threads run meanwhile."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it never came to this"
        time.sleep(0.001)


def wait_for_waiters(timeline: Any, count: int = 1) -> None:
    """Wait until so many threads, of any process, sleep on a HostTimeline."""
    with timeline.export() as handle, mmap.mmap(handle.fileno(), 4096) as page:
        wait_until(lambda: int.from_bytes(page[WAITERS], "little") == count)

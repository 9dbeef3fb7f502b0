"""Wait for what other threads and processes do, by what can be seen of them."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def opened_soon(gate: Any) -> Iterator[None]:
    """Open a gate from another thread beside a block, which waits for the work behind it."""
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    yield
    opener.join()


@contextmanager
def without_waiting(gate: Any, patience_s: float = 30) -> Iterator[None]:
    """Let a block end before `gate` is opened.

    In the end it is opened, so that a call that waits for it is a failure and not a hang.
    """
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        gate.open()

    timer = threading.Timer(patience_s, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    assert not late, "it waited for the work that the gate holds"

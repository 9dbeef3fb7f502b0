"""Mappings of other processes' blocks, each kept for a moment after its last use.

To map a block takes about 0.1 ms for each of its pages, and a sender mostly sends the same memory
again. An unused mapping holds the sender's physical memory, so it is kept for one second,
and at most `MAX_IDLE` are. A thread ends them; it runs while there are any.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic, sleep

from gpumem._resource.handle import OpenedPages
from gpumem._support.forks import ForkLock

KEPT_SECONDS = 1.0
MAX_IDLE = 64


class MappedBlock:
    """One use of a mapping, until `close`."""

    __slots__ = ("_key", "_mappings", "_pages")

    def __init__(self, mappings: Mappings, key: str, pages: OpenedPages) -> None:
        self._mappings = mappings
        self._key = key
        self._pages: OpenedPages | None = pages

    @property
    def address(self) -> int:
        """Address at which the block's first page is mapped."""
        assert self._pages is not None, "closed"
        return self._pages.address

    def close(self) -> None:
        """End this use. Work that is queued may still use the memory."""
        pages, self._pages = self._pages, None
        if pages is not None:
            self._mappings.release(self._key, pages)


class Mappings:
    """The mappings of this process, by a key for the mapped memory."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._used: dict[str, tuple[OpenedPages, int]] = {}  # with the number of uses
        self._idle: dict[str, tuple[OpenedPages, float]] = {}  # with its last use; the oldest first
        self._thread_runs = False
        self._inherited: list[object] = []
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def take(self, key: str, make: Callable[[], OpenedPages]) -> MappedBlock:
        """Use the mapping of a key, which `make` returns if there is none."""
        pages = self._found(key)
        if pages is None:
            fresh = make()  # without the lock, because it requests pages of another process
            with self._lock:
                pages = self._found(key)  # another thread may have made one too
                if pages is None:
                    pages = fresh
                    self._used[key] = pages, 1
        return MappedBlock(self, key, pages)

    def _found(self, key: str) -> OpenedPages | None:
        with self._lock:
            if key in self._idle:
                pages, uses = self._idle.pop(key)[0], 0
            elif key in self._used:
                pages, uses = self._used[key]
            else:
                return None
            self._used[key] = pages, uses + 1
            return pages

    def release(self, key: str, pages: OpenedPages) -> None:
        """End one use of a mapping."""
        excess = None  # unmapped without the lock, because that waits for the device
        with self._lock:
            held, uses = self._used.get(key, (None, 0))
            if held is not pages:
                return  # it is the parent's of a fork
            if uses > 1:
                self._used[key] = pages, uses - 1
                return
            del self._used[key]
            self._idle[key] = pages, monotonic()
            if len(self._idle) > MAX_IDLE:
                excess = self._idle.pop(next(iter(self._idle)))
            if not self._thread_runs:
                threading.Thread(target=self._run, name="gpumem mappings", daemon=True).start()
                self._thread_runs = True
        del excess

    def drop_idle(self) -> None:
        """Unmap every mapping that is not in use."""
        with self._lock:
            idle, self._idle = self._idle, {}
        idle.clear()

    def _run(self) -> None:
        pause: float | None = KEPT_SECONDS
        while pause is not None:
            sleep(pause)
            old, pause = self._old()
            old.clear()

    def _old(self) -> tuple[list[OpenedPages], float | None]:
        """Remove and return expired mappings, and return the seconds to the next expiry or None."""
        old: list[OpenedPages] = []
        with self._lock:
            now = monotonic()
            while self._idle:
                key, (pages, since) = next(iter(self._idle.items()))
                if now < since + KEPT_SECONDS:
                    return old, since + KEPT_SECONDS - now
                old.append(pages)
                del self._idle[key]
            self._thread_runs = False
        return old, None

    def _leave_to_parent(self) -> None:
        # In a fork's child: to unmap them there would call the driver, which a child cannot.
        self._inherited += [self._used, self._idle]
        self._used, self._idle = {}, {}
        self._thread_runs = False

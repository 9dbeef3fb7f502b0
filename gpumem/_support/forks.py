"""Locks that a fork's child finds free."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


class ForkLock:
    """A reentrant lock that is free in a fork's child, also if a thread of the parent held it.

    Only the forking thread runs in the child. Another thread may have been changing arenas under
    the lock: these are the parent's, and raise an error when they are used.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def enter_if_free(self) -> bool:
        """Acquire it unless another thread has it; return whether it was acquired."""
        return self._lock.acquire(blocking=False)

    def leave(self) -> None:
        """Release the lock after `enter_if_free`."""
        self._lock.release()


def _renew_all() -> None:
    for lock in list(_locks):
        lock._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_all)

"""Descriptors that a worker holds for others until they request them."""

from __future__ import annotations

import secrets
from errno import EBADF
from time import monotonic

from gpumem._resource.handle import Handle
from gpumem._support.forks import ForkLock
from gpumem.errors import BadHandleError


class Offers:
    """Handles by token. Each is held until it is collected, once, or expires.

    Parameters
    ----------
    seconds : float
        Time after which an offer expires.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.expired = 0  # number of offers so far
        self._lock = ForkLock()
        self._held: dict[str, tuple[Handle, int, float]] = {}  # with bytes, and the time of expiry

    def add(self, handle: Handle, nbytes: int) -> str:
        """Hold a handle, which this object owns from here on, and return its token."""
        token = secrets.token_hex(8)
        with self._lock:
            self._held[token] = (handle, nbytes, monotonic() + self.seconds)
        return token

    def collect(self, token: str) -> Handle:
        """Return a handle, which the caller owns from here on.

        Raises
        ------
        BadHandleError
            It was collected or expired.
        """
        self.expire()
        with self._lock:
            found = self._held.pop(token, None)
        if found is None:
            raise BadHandleError(
                EBADF, f"descriptor {token} was collected, or expired after {self.seconds} s"
            )
        return found[0]

    def expire(self) -> None:
        """Close handles that were not collected in time."""
        now = monotonic()
        with self._lock:
            late = [token for token, (_, _, until) in self._held.items() if until <= now]
            for token in late:
                self._held.pop(token)[0].close()
            self.expired += len(late)

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            for handle, _, _ in self._held.values():
                handle.close()
            self._held.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is offered now."""
        with self._lock:
            return sum(nbytes for _, nbytes, _ in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

"""Descriptors that stand for memory of another process, owned by an object."""

from __future__ import annotations

import os
from typing import Any, Self

from gpumem.errors import ClosedError

__all__ = ["Handle"]


class Handle:
    """Owns a file descriptor and closes it.

    Whatever it stands for stays alive as long as the descriptor is open in some process. Sent
    through `multiprocessing` (a pipe, a queue, a process's arguments), it arrives as a descriptor
    of the receiving process.

    Parameters
    ----------
    fd : int
        An open descriptor; from here on this object's.

    Raises
    ------
    TypeError, ValueError
        `fd` is no integer, or negative.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.DriverPool("host", {"shareable": True}) as pool:
    ...     with pool.export_handle() as handle:
    ...         handle.fileno() > 0
    True
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = -1
        if isinstance(fd, bool) or not isinstance(fd, int):
            raise TypeError(f"a descriptor must be an integer, not {type(fd).__name__}")
        if fd < 0:
            raise ValueError(f"descriptor {fd} is negative: it takes 0 or more")
        self._fd = fd

    def fileno(self) -> int:
        """Return the descriptor, which stays this object's.

        Raises
        ------
        ClosedError
            It was closed or detached.
        """
        if self._fd < 0:
            raise ClosedError("this handle is closed")
        return self._fd

    def detach(self) -> int:
        """Return the descriptor, which the caller closes; this object is closed."""
        fd = self.fileno()
        self._fd = -1
        return fd

    @property
    def closed(self) -> bool:
        """Whether it was closed or detached."""
        return self._fd < 0

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return (_received, (DupFd(self.fileno()),))

    def __repr__(self) -> str:
        return "<gpumem.Handle, closed>" if self.closed else f"<gpumem.Handle {self._fd}>"


def _received(duplicate: Any) -> Handle:
    return Handle(duplicate.detach())

"""Asking a callback before giving up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumem._buffer.buffer import Buffer, MemoryResource
from gpumem.adaptors._adaptor import Adaptor, serve_from

__all__ = ["FailureAdaptor", "on_failure"]


class FailureAdaptor(Adaptor):
    """A resource that asks a callback before it gives up; see `on_failure`.

    Examples
    --------
    >>> import gpumem
    >>> asked = []
    >>> small = gpumem.adaptors.limit(gpumem.Arena("host"), 1000)
    >>> def again(nbytes, attempt):
    ...     asked.append(attempt)
    ...     return attempt < 3
    >>> patient = FailureAdaptor(small, again)
    >>> try:
    ...     patient.allocate(2000)
    ... except gpumem.OutOfMemoryError:
    ...     asked
    [1, 2, 3]
    """

    def __init__(
        self,
        resource: MemoryResource,
        callback: Callable[[int, int], bool],
        *,
        name: str | None = None,
    ) -> None:
        if not callable(callback):
            raise TypeError(f"callback {callback!r} is not callable")
        super().__init__((resource,), name=name)
        self._callback = callback

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        attempt = 0
        while True:
            try:
                return serve_from(self.upstreams[0], nbytes, stream, options, persistent)
            except MemoryError:
                attempt += 1
                again = self._callback(nbytes, attempt)
                if not isinstance(again, bool):
                    raise TypeError(
                        f"callback {self._callback!r} returned {again!r}: it returns True to try "
                        "again, False to give up"
                    ) from None
                if not again:
                    raise


def on_failure(
    resource: MemoryResource, callback: Callable[[int, int], bool], *, name: str | None = None
) -> FailureAdaptor:
    """Ask a callback, when there is no memory, whether to try again.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    callback : callable
        ``callback(nbytes, attempt) -> bool``: bytes asked for, and how often that failed now, from
        1. It may free buffers, shrink, spill. True: the upstream is asked again. False: its
        MemoryError is raised.
    name : str, optional
        For people; the upstream's by default.

    Returns
    -------
    FailureAdaptor

    Raises
    ------
    TypeError
        `resource` is no MemoryResource, or `callback` not callable. In `allocate`: `callback`
        returned something other than True or False; what it raises passes as it is.

    Examples
    --------
    >>> import gpumem
    >>> small = gpumem.adaptors.limit(gpumem.Arena("host"), 1000)
    >>> cache = [small.allocate(600)]
    >>> spill = lambda nbytes, attempt: bool(cache and [cache.pop()])
    >>> spilling = gpumem.adaptors.on_failure(small, spill)
    >>> spilling.allocate(600).nbytes
    600
    """
    return FailureAdaptor(resource, callback, name=name)

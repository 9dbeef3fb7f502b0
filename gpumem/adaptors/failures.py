"""FailureAdaptor: a callback decides whether a failed allocation is tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem.adaptors._adaptor import Adaptor, serve_from


class FailureAdaptor(Adaptor):
    """A resource that calls a callback when an allocation fails, and may try again after it.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    callback : callable
        ``callback(nbytes, attempt) -> bool``: the requested bytes, and the number of failed
        attempts, from 1. It may free buffers, shrink, spill. True: another attempt. False: the
        upstream's MemoryError is raised.
    name : str, optional
        Name used in error messages and reports; the upstream's by default.

    Raises
    ------
    TypeError
        `resource` is not a MemoryResource, or `callback` not callable. In ``allocate``: `callback`
        returned something other than True or False; its own exceptions are not caught.

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
                        f"callback {self._callback!r} returned {again!r}: expected True to try "
                        "again or False"
                    ) from None
                if not again:
                    raise


on_failure = FailureAdaptor

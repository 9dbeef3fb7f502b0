"""AnnotateAdaptor: NVTX ranges on a profiler's timeline, by the package nvtx."""

from __future__ import annotations

import functools
from typing import Any

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem.adaptors._adaptor import Adaptor, serve_from
from gpumem.errors import MissingFrameworkError
from gpumem.stats import ShrinkReport


class AnnotateAdaptor(Adaptor):
    """A resource with calls on a profiler's timeline, such as that of Nsight Systems.

    Each ``allocate``, ``allocate_persistent`` and ``shrink`` is an NVTX range of its name on the
    calling thread, with the requested bytes as payload; each free is a mark with the block's. A
    range lasts as long as the call: a cached block makes a point, growth and waits for streams
    make long ranges. Without a profiler nvtx does nothing.

    Only calls through this adaptor appear; other users of the resource pay nothing.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    domain : str, optional
        NVTX's domain, by which profilers group and filter.
    name : str, optional
        Name used in error messages and reports; the upstream's by default.

    Raises
    ------
    MissingFrameworkError
        The package nvtx is not installed.
    TypeError
        `resource` is not a MemoryResource, or `domain` not a str.

    Examples
    --------
    >>> import gpumem
    >>> marked = gpumem.adaptors.annotate(gpumem.Arena("host"), domain="loader")
    >>> marked.allocate(1000).nbytes     # a range and a mark, if a profiler is attached
    1000
    """

    def __init__(
        self, resource: MemoryResource, *, domain: str = "gpumem", name: str | None = None
    ) -> None:
        if not isinstance(domain, str):
            raise TypeError(f"domain must be a str, not {type(domain).__name__}")
        try:
            import nvtx
        except ImportError as error:
            raise MissingFrameworkError(
                f"annotate needs the package nvtx (pip install nvtx): {error}",
                name="nvtx",
            ) from error
        super().__init__((resource,), name=name, tells=True)
        self._range = functools.partial(nvtx.annotate, domain=domain)
        self._mark = functools.partial(nvtx.mark, domain=domain)

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        with self._range("allocate_persistent" if persistent else "allocate", payload=nbytes):
            return serve_from(self.upstreams[0], nbytes, stream, options, persistent)

    def _on_free(
        self, address: int, nbytes: int, stream: int, time: int, thread: int, note: Any
    ) -> None:
        self._mark("free", payload=nbytes)

    def shrink(self) -> ShrinkReport:
        """Shrink the upstream, within a range; see its ``shrink``."""
        with self._range("shrink"):
            return self.upstreams[0].shrink()


annotate = AnnotateAdaptor

"""Runs as graphs: the work of a session's function is captured once, and launched by later runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, SupportsIndex

from gpumem._buffer.buffer import Accesses, Buffer, Leases
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Graph, Stream
from gpumem._tensor import Tensor
from gpumem.session.bindings import Forwarding, RunContext

Call = Callable[[MemoryResource], RunContext]


class CapturedRun:
    """The graph of one session, for the last function and bindings.

    The first run is an ordinary one: it loads code, makes the outputs and warms caches, which a
    graph cannot do. The second is captured and launched, later ones are only launched. Another
    function or binding starts again with a first run, and so does a failed run, or an output or a
    copied input that its user closed.
    """

    def __init__(self, allocator: MemoryResource) -> None:
        self._allocator = allocator
        self.forget()

    def forget(self) -> None:
        """Start again with a first run: memory that the graph uses is replaced."""
        self._key: object = None
        self._graph: Graph | None = None
        self._context: RunContext | None = None
        self._written: list[Tensor] = []  # by every run of the same work
        self._kept: Any = None  # a GraphPool or Leases: owner of memory that the graph writes to
        self._is_captured = False

    def begin(self, key: object, accesses: Accesses) -> None:
        """Begin accesses of the memory of the graph that a run would launch."""
        if self._graph is not None and key == self._key:
            for home in self._kept._homes:
                accesses.add_home(home)

    def run(self, key: object, stream: Stream, call: Call) -> RunContext:
        """Do the work of `call`, by calling it or by launching its captured work."""
        if key != self._key or any(tensor.buffer.closed for tensor in self._written):
            self.forget()
            context = call(self._allocator)
            self._key = key
            self._written = [*context._work.values(), *context._results.values()]
            return context
        try:
            if not self._is_captured:
                context = self._capture(stream, call)
            elif self._graph is None:  # the capture is empty: the work is in the function itself
                context = call(self._allocator)
            if self._graph is not None:
                self._graph.launch()
        except BaseException:
            self.forget()
            raise
        return self._context or context

    def _capture(self, stream: Stream, call: Call) -> RunContext:
        graph = Graph(stream)
        with serving(self._allocator, stream) as (allocator, keep):
            graph.begin()
            try:
                context = call(allocator)
                graph.end()
            except BaseException:
                graph.abandon()  # else the stream would capture later work of the caller
                raise
        self._is_captured = True
        if graph.node_count:
            self._kept = keep(graph.handle)
            graph.instantiate()
            self._graph, self._context = graph, context
            context.inputs = {}  # else a replaced input would live as long as this object
        return context


@contextlib.contextmanager
def serving(resource: MemoryResource, stream: Stream) -> Any:
    """Yield the allocator of a capture, and a function that returns the owner of its memory."""
    if not hasattr(resource, "capture"):
        keeping = Keeping(resource, stream)
        yield keeping, lambda handle: keeping.leases
        return

    with resource.capture(stream) as pool:

        def retain(handle: int) -> object:
            pool.retain_with(handle)
            return pool

        yield resource, retain


class Keeping(Forwarding):
    """Allocates another resource's blocks, which live as long as `leases`.

    The graph is launched on `stream`, whichever streams its blocks were allocated for.
    """

    def __init__(self, resource: MemoryResource, stream: Stream) -> None:
        super().__init__(resource)
        self.leases = Leases()
        self._stream = stream

    def allocate(self, nbytes: SupportsIndex | str, stream: Any = None, **options: Any) -> Buffer:
        """Allocate a block of the resource."""
        return self._kept(super().allocate(nbytes, stream, **options))

    def allocate_persistent(self, nbytes: SupportsIndex | str) -> Buffer:
        """Allocate a long-lived block of the resource."""
        return self._kept(super().allocate_persistent(nbytes))

    def _kept(self, buffer: Buffer) -> Buffer:
        buffer.record_stream(self._stream)
        self.leases.add(buffer)
        return buffer

"""Graphs of a stream's work: captured once, launched as often as one likes."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uintptr_t

from gpumem._buffer cimport Buffer, buffer_share, drop_share, Stream
from gpumem._native.driver cimport (
    check, context_enter, context_is_dead, context_leave, CU_STREAM_CAPTURE_MODE_RELAXED,
    CUDA_SUCCESS, CUgraph, CUgraphExec, CUresult, DriverDevice,
)

from gpumem.errors import ClosedError


@cython.final
@cython.no_gc_clear     # the end needs `driver_device`
cdef class Graph:
    """What is queued on a stream between `begin` and `end`, to be launched there.

    Parameters
    ----------
    stream : Stream
        Where work is captured and launched; not the legacy default stream.
    """

    cdef Stream stream
    cdef DriverDevice driver_device
    cdef CUgraph graph
    cdef CUgraphExec ready

    def __init__(self, Stream stream not None):
        if self.driver_device is not None:
            raise TypeError("a Graph is initialised once")
        self.stream = stream
        self.driver_device = stream.driver_device

    def __dealloc__(self):
        if self.driver_device is None or context_is_dead(&self.driver_device.context):
            return
        if context_enter(&self.driver_device.context) != CUDA_SUCCESS:
            return
        if self.ready != NULL:
            self.driver_device.context.table.cuGraphExecDestroy(self.ready)
        if self.graph != NULL:
            self.driver_device.context.table.cuGraphDestroy(self.graph)
        context_leave(&self.driver_device.context)

    def begin(self):
        """Capture from now on; other threads and streams go on as they were."""
        cdef CUresult code
        self.enter()
        code = self.driver_device.context.table.cuStreamBeginCapture(self.stream.handle,
                                                                     CU_STREAM_CAPTURE_MODE_RELAXED)
        context_leave(&self.driver_device.context)
        check(self.driver_device.context.table, code, "cuStreamBeginCapture")

    def end(self):
        """End the capture; DriverError if something made it invalid."""
        cdef CUresult code
        self.enter()
        code = self.driver_device.context.table.cuStreamEndCapture(self.stream.handle, &self.graph)
        context_leave(&self.driver_device.context)
        check(self.driver_device.context.table, code, "cuStreamEndCapture")

    def abandon(self):
        """End the capture, if it has not ended, and forget what it captured."""
        self.enter()
        self.driver_device.context.table.cuStreamEndCapture(self.stream.handle, &self.graph)
        context_leave(&self.driver_device.context)

    @property
    def handle(self):
        """The native graph."""
        return <uintptr_t>self.graph

    @property
    def node_count(self):
        """How many pieces of work were captured."""
        cdef size_t count = 0
        cdef CUresult code
        self.enter()
        code = self.driver_device.context.table.cuGraphGetNodes(self.graph, NULL, &count)
        context_leave(&self.driver_device.context)
        check(self.driver_device.context.table, code, "cuGraphGetNodes")
        return count

    def instantiate(self):
        """Make it ready to be launched."""
        cdef CUresult code
        self.enter()
        with nogil:
            code = self.driver_device.context.table.cuGraphInstantiateWithFlags(&self.ready,
                                                                                self.graph, 0)
            context_leave(&self.driver_device.context)
        check(self.driver_device.context.table, code, "cuGraphInstantiateWithFlags")

    def launch(self):
        """Queue the captured work on the stream."""
        cdef CUresult code
        self.enter()
        with nogil:
            code = self.driver_device.context.table.cuGraphLaunch(self.ready, self.stream.handle)
            context_leave(&self.driver_device.context)
        check(self.driver_device.context.table, code, "cuGraphLaunch")

    cdef int enter(self) except -1:
        if context_is_dead(&self.driver_device.context):
            raise ClosedError("this graph belongs to the parent process")
        return check(self.driver_device.context.table, context_enter(&self.driver_device.context),
                     "cuCtxPushCurrent")


@cython.final
@cython.no_gc_clear
cdef class Leases:
    """Claims on buffers' blocks: they live at least as long as this object."""

    cdef list held

    def __cinit__(self):
        self.held = []

    def add(self, Buffer buffer not None):
        """Keep a buffer's block, also when the buffer is closed."""
        if buffer.block_bytes:
            self.held.append(<uintptr_t>buffer_share(buffer))

    def __dealloc__(self):
        cdef uintptr_t lease
        for held in self.held:
            lease = held
            drop_share(<void*>lease)

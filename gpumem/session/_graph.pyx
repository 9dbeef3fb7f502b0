"""Graphs of a stream's work: captured once, launched any number of times."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uintptr_t

from gpumem._buffer cimport Buffer, buffer_share, drop_share, ResourceBase, Stream
from gpumem._native.driver cimport (
    check, context_enter, context_is_dead, context_leave, CU_STREAM_CAPTURE_MODE_RELAXED,
    CUDA_SUCCESS, CUgraph, CUgraphExec, CUresult, DeviceContext, DriverDevice,
)

from gpumem.errors import ClosedError


@cython.final
@cython.no_gc_clear     # __dealloc__ needs `driver_device`
cdef class Graph:
    """The work that is queued on a stream between `begin` and `end`, to be launched there.

    Parameters
    ----------
    stream : Stream
        The stream of capture and launches; not the legacy default stream.
    """

    cdef Stream stream
    cdef DriverDevice driver_device
    cdef DeviceContext* context     # of `driver_device`
    cdef CUgraph graph
    cdef CUgraphExec ready

    def __cinit__(self, Stream stream not None):
        self.stream = stream
        self.driver_device = stream.driver_device
        self.context = &self.driver_device.context

    def __dealloc__(self):
        if self.driver_device is None or context_is_dead(self.context):
            return
        # A launch may still run, and wait for a Python thread.
        with nogil:
            self.destroy()
            self.destroy()      # once more what the driver refused

    def begin(self):
        """Capture from now on; other threads and streams are not affected."""
        cdef CUresult code
        self.enter()
        with nogil:
            code = self.context.table.cuStreamBeginCapture(self.stream.handle,
                                                           CU_STREAM_CAPTURE_MODE_RELAXED)
        self.leave(code, "cuStreamBeginCapture")

    def end(self):
        """End the capture; DriverError if it became invalid."""
        cdef CUresult code
        self.enter()
        with nogil:
            code = self.context.table.cuStreamEndCapture(self.stream.handle, &self.graph)
        self.leave(code, "cuStreamEndCapture")

    def abandon(self):
        """End the capture, if it has not ended; what it captured is not used."""
        self.enter()
        with nogil:
            self.context.table.cuStreamEndCapture(self.stream.handle, &self.graph)
        context_leave(self.context)

    @property
    def handle(self):
        """The native graph."""
        return <uintptr_t>self.graph

    @property
    def node_count(self):
        """Number of captured operations."""
        cdef size_t count = 0
        self.enter()
        self.leave(self.context.table.cuGraphGetNodes(self.graph, NULL, &count), "cuGraphGetNodes")
        return count

    def instantiate(self):
        """Make it ready to be launched."""
        cdef CUresult code
        self.enter()
        with nogil:
            code = self.context.table.cuGraphInstantiateWithFlags(&self.ready, self.graph, 0)
        self.leave(code, "cuGraphInstantiateWithFlags")

    def launch(self):
        """Queue the captured work on the stream."""
        cdef CUresult code
        self.enter()
        with nogil:
            code = self.context.table.cuGraphLaunch(self.ready, self.stream.handle)
        self.leave(code, "cuGraphLaunch")

    cdef void destroy(self) noexcept nogil:
        if context_enter(self.context) != CUDA_SUCCESS:
            return
        if (self.ready != NULL
                and self.context.table.cuGraphExecDestroy(self.ready) == CUDA_SUCCESS):
            self.ready = NULL
        if self.graph != NULL and self.context.table.cuGraphDestroy(self.graph) == CUDA_SUCCESS:
            self.graph = NULL
        context_leave(self.context)

    cdef int enter(self) except -1:
        if context_is_dead(self.context):
            raise ClosedError("this graph belongs to the parent process")
        return check(self.context.table, context_enter(self.context), "cuCtxPushCurrent")

    cdef int leave(self, CUresult code, str call) except -1:
        """Undo `enter` after a driver call; DriverError if the call failed."""
        context_leave(self.context)
        return check(self.context.table, code, call)


@cython.final
@cython.no_gc_clear
cdef class Leases:
    """Claims on buffers' blocks: they live at least as long as this object."""

    cdef list leases            # addresses
    cdef set homes              # whose memory the blocks lie in

    def __cinit__(self):
        self.leases = []
        self.homes = set()

    def add(self, Buffer buffer not None):
        """Keep a buffer's block alive, also when the buffer is closed."""
        if buffer.block_bytes:
            self.homes.add(buffer.home)
            self.leases.append(<uintptr_t>buffer_share(buffer))

    def _require_awake(self):
        """Raise AsleepError if the memory of one of the blocks is asleep."""
        for home in self.homes:
            (<ResourceBase>home).require_present()

    def __dealloc__(self):
        for lease in self.leases:
            drop_share(<void*><uintptr_t>lease)

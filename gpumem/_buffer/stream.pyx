"""Streams, events and graphs, and the order of accesses to a buffer; see stream.pxd."""

from operator import index

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t, uintptr_t

from gpumem._buffer.buffer cimport Buffer, require_open
from gpumem._native.driver cimport (
    check, context_enter, context_is_dead, context_leave, CU_EVENT_DISABLE_TIMING,
    CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUevent, CUgraph, CUgraphExec, CUresult, CUstream,
    CUstreamCaptureStatus, device_enter, device_leave, DeviceContext, DriverDevice,
    synchronize_device, synchronize_event, synchronize_stream,
)
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem._support.notebooks import html_table
from gpumem._support.signatures import ClassSignature
from gpumem.device import Device, devices
from gpumem.errors import ClosedError


# The collector of cycles may clear an object's references before its end, which needs
# `driver_device`.
@cython.no_gc_clear
cdef class Stream:
    """An in-order queue of work on a device.

    On the host device the queue is real: it has a worker thread of its own. The stream is
    non-blocking with respect to the legacy default stream, and is destroyed with this object;
    work still queued then is finished first.

    Parameters
    ----------
    device : Device or str
        Where the work runs.

    Raises
    ------
    ValueError
        Unknown device.
    DriverError
        The driver refused.

    Examples
    --------
    >>> import gpumem
    >>> stream = gpumem.Stream("host")
    >>> stream.synchronize()
    """

    __signature__ = ClassSignature()

    def __init__(self, device):
        """Take the arguments that the class describes."""
        cdef DeviceContext* context
        cdef CUresult code
        if self.driver_device is not None:
            raise TypeError("Stream.__init__ called twice")
        self.device = Device(device)
        self.driver_device = self.device._open()
        context = enter(self.driver_device, "cuStreamCreate")
        with nogil:
            code = context.table.cuStreamCreate(&self.handle, CU_STREAM_NON_BLOCKING)
        leave(context, code, "cuStreamCreate")
        self.owned = True

    def __dealloc__(self):
        cdef DeviceContext* context
        if not self.owned or context_is_dead(&self.driver_device.context):
            return
        context = &self.driver_device.context
        # The interpreter lock is released, as everywhere here: a driver's call may wait for room in
        # a queue, and work in that queue for a Python thread.
        with nogil:
            if context_enter(context) == CUDA_SUCCESS:
                context.table.cuStreamDestroy(self.handle)
                context_leave(context)

    @staticmethod
    def from_handle(device, handle, owner=None):
        """Wrap a stream of another owner; it is never destroyed here.

        Parameters
        ----------
        device : Device or str
        handle : int
            The native handle; 0 and 1 are the legacy default stream, 2 the calling thread's.
        owner : object, optional
            Kept alive as long as this object.

        Examples
        --------
        >>> import gpumem
        >>> made_elsewhere = gpumem.Stream("host")
        >>> stream = gpumem.Stream.from_handle("host", made_elsewhere.ptr, owner=made_elsewhere)
        >>> stream == made_elsewhere
        True
        """
        cdef Stream stream = Stream.__new__(Stream)
        stream.handle = <CUstream>checked_handle(handle)
        stream.device = Device(device)
        stream.driver_device = stream.device._open()
        stream.owner = owner
        return stream

    @property
    def ptr(self):
        """The native handle as an integer."""
        return <uintptr_t>self.handle

    def __cuda_stream__(self):
        """Return (0, handle): the protocol by which libraries exchange streams."""
        return 0, <uintptr_t>self.handle

    def query(self):
        """Return whether all work queued so far has finished; never waits."""
        cdef DeviceContext* context = enter(self.driver_device, "cuStreamQuery")
        return leave(context, context.table.cuStreamQuery(self.handle), "cuStreamQuery")

    @property
    def capturing(self):
        """Whether work is being captured into a graph now, instead of run."""
        cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
        cdef DeviceContext* context
        require_usable(self.driver_device)
        if self.driver_device.context.table.cuStreamIsCapturing == NULL:
            return False
        context = enter(self.driver_device, "cuStreamIsCapturing")
        leave(context, context.table.cuStreamIsCapturing(self.handle, &status),
              "cuStreamIsCapturing")
        return status != CU_STREAM_CAPTURE_STATUS_NONE

    def synchronize(self):
        """Wait until all work queued so far has finished; Ctrl-C ends the wait."""
        require_usable(self.driver_device)
        synchronize_stream(&self.driver_device.context, self.handle)

    def record(self, event=None):
        """Record an event after all work queued so far and return it.

        Parameters
        ----------
        event : Event, optional
            An event of this device that is recorded again; earlier waits for it keep their point.
            None: a new one.

        Raises
        ------
        TypeError
            `event` is not an Event.
        ValueError
            It is of another device.

        Examples
        --------
        >>> import gpumem
        >>> stream = gpumem.Stream("host")
        >>> event = stream.record()
        >>> event.synchronize()
        >>> event.query()
        True
        """
        cdef Event recorded
        cdef DeviceContext* context
        cdef CUresult code
        if event is None:
            recorded = Event(self.device)
        elif not isinstance(event, Event):
            raise TypeError(f"event must be an Event or None, not {type(event).__name__}")
        else:
            recorded = event
            if recorded.driver_device is not self.driver_device:
                raise ValueError(f"an event of {recorded.device} cannot be recorded on "
                                 f"{self.device}")
        context = enter(self.driver_device, "cuEventRecord")
        with nogil:
            code = context.table.cuEventRecord(recorded.handle, self.handle)
        leave(context, code, "cuEventRecord")
        return recorded

    def wait(self, event):
        """Let work queued from now on wait, on the device, for a point in other work.

        Parameters
        ----------
        event : Event or TimelinePoint
            An event of this device or another one of its type; or any object with
            ``enqueue_wait(stream)``, which queues the wait, as a timeline's point has.

        Raises
        ------
        TypeError
            It is neither.
        ValueError
            An event of another type of device. A point raises the errors of its timeline.

        Examples
        --------
        >>> import gpumem
        >>> loader, trainer = gpumem.Stream("host"), gpumem.Stream("host")
        >>> trainer.wait(loader.record())    # later work of `trainer` follows that of `loader`
        >>> trainer.synchronize()
        >>> loader.query()
        True
        """
        if isinstance(event, Event):
            if (<Event>event).driver_device.type != self.driver_device.type:
                raise ValueError(f"an event of {event.device} cannot be waited for on "
                                 f"{self.device}")
            wait_for_event(self.driver_device, self.handle, event)
            return
        enqueue = getattr(event, "enqueue_wait", None)
        if enqueue is None:
            raise TypeError(f"a stream waits for an Event or a timeline's point, not {event!r}")
        enqueue(self)

    def __eq__(self, other):
        if not isinstance(other, Stream):
            return NotImplemented
        return (self.handle == (<Stream>other).handle
                and self.device == (<Stream>other).device)

    def __hash__(self):
        return hash((self.device, <uintptr_t>self.handle))

    def __repr__(self):
        return f"<gpumem.Stream {<uintptr_t>self.handle:#x} on {self.device}>"


@cython.no_gc_clear      # as in Stream
cdef class Event:
    """A point in a stream's work, without timing.

    `Stream.record` makes one; a loop may make one itself and record it again each time.

    Parameters
    ----------
    device : Device or str

    Examples
    --------
    >>> import gpumem
    >>> stream = gpumem.Stream("host")
    >>> event = stream.record()
    >>> event.synchronize()              # waits for that point, not for later work
    >>> event = gpumem.Event("host")
    >>> event.query()                    # never recorded: nothing to wait for
    True
    >>> stream.record(event) is event
    True
    """

    __signature__ = ClassSignature()

    def __init__(self, device):
        """Take the arguments that the class describes."""
        cdef DeviceContext* context
        if self.driver_device is not None:
            raise TypeError("Event.__init__ called twice")
        self.device = Device(device)
        self.driver_device = self.device._open()
        context = enter(self.driver_device, "cuEventCreate")
        leave(context, context.table.cuEventCreate(&self.handle, CU_EVENT_DISABLE_TIMING),
              "cuEventCreate")

    def __dealloc__(self):
        cdef DeviceContext* context
        if self.handle == NULL or context_is_dead(&self.driver_device.context):
            return
        context = &self.driver_device.context
        with nogil:
            if context_enter(context) == CUDA_SUCCESS:
                context.table.cuEventDestroy(self.handle)
                context_leave(context)

    @property
    def ptr(self):
        """The native handle as an integer."""
        return <uintptr_t>self.handle

    def query(self):
        """Return whether the point has been reached; True if it was never recorded."""
        cdef DeviceContext* context = enter(self.driver_device, "cuEventQuery")
        return leave(context, context.table.cuEventQuery(self.handle), "cuEventQuery")

    def synchronize(self):
        """Wait until the point has been reached; Ctrl-C ends the wait."""
        require_usable(self.driver_device)
        synchronize_event(&self.driver_device.context, self.handle)

    def __repr__(self):
        return f"<gpumem.Event {<uintptr_t>self.handle:#x} on {self.device}>"

    def _repr_html_(self):
        # The table does not say whether the point is reached: a query can fail, and it invalidates
        # a capture.
        rows = {"device": str(self.device), "handle": f"{<uintptr_t>self.handle:#x}"}
        return html_table("gpumem.Event", rows)


@cython.final
@cython.no_gc_clear     # __dealloc__ needs `stream`
cdef class Graph:
    """A graph of the work that is queued on a stream between `begin` and `end`, launched there.

    Parameters
    ----------
    stream : Stream
        The stream of capture and launches; not the legacy default stream.
    """

    cdef Stream stream
    cdef CUgraph graph
    cdef CUgraphExec ready

    def __cinit__(self, Stream stream not None):
        require_usable(stream.driver_device)
        self.stream = stream

    def __dealloc__(self):
        if self.stream is None or context_is_dead(&self.stream.driver_device.context):
            return
        # A launch may still run, and wait for a Python thread. The second call repeats steps that
        # the driver refused.
        with nogil:
            destroy_graph(&self.stream.driver_device.context, &self.graph, &self.ready)
            destroy_graph(&self.stream.driver_device.context, &self.graph, &self.ready)

    def begin(self):
        """Capture from now on; other threads and streams are not affected."""
        cdef DeviceContext* context = enter(self.stream.driver_device, "cuStreamBeginCapture")
        cdef CUresult code
        with nogil:
            code = context.table.cuStreamBeginCapture(self.stream.handle,
                                                      CU_STREAM_CAPTURE_MODE_RELAXED)
        leave(context, code, "cuStreamBeginCapture")

    def end(self):
        """End the capture; DriverError if it became invalid."""
        cdef DeviceContext* context = enter(self.stream.driver_device, "cuStreamEndCapture")
        cdef CUresult code
        with nogil:
            code = context.table.cuStreamEndCapture(self.stream.handle, &self.graph)
        leave(context, code, "cuStreamEndCapture")

    def abandon(self):
        """End the capture, if it has not ended; the captured work is not used."""
        cdef DeviceContext* context = enter(self.stream.driver_device, "cuStreamEndCapture")
        with nogil:
            context.table.cuStreamEndCapture(self.stream.handle, &self.graph)
        context_leave(context)

    @property
    def handle(self):
        """The native graph."""
        return <uintptr_t>self.graph

    @property
    def node_count(self):
        """Number of captured operations."""
        cdef DeviceContext* context = enter(self.stream.driver_device, "cuGraphGetNodes")
        cdef size_t count = 0
        leave(context, context.table.cuGraphGetNodes(self.graph, NULL, &count), "cuGraphGetNodes")
        return count

    def instantiate(self):
        """Make it ready to be launched."""
        cdef DeviceContext* context = enter(self.stream.driver_device,
                                            "cuGraphInstantiateWithFlags")
        cdef CUresult code
        with nogil:
            code = context.table.cuGraphInstantiateWithFlags(&self.ready, self.graph, 0)
        leave(context, code, "cuGraphInstantiateWithFlags")

    def launch(self):
        """Queue the captured work on the stream."""
        cdef DeviceContext* context = enter(self.stream.driver_device, "cuGraphLaunch")
        cdef CUresult code
        with nogil:
            code = context.table.cuGraphLaunch(self.ready, self.stream.handle)
        leave(context, code, "cuGraphLaunch")


cdef void destroy_graph(DeviceContext* context, CUgraph* graph, CUgraphExec* ready) noexcept nogil:
    if context_enter(context) != CUDA_SUCCESS:
        return
    if ready[0] != NULL and context.table.cuGraphExecDestroy(ready[0]) == CUDA_SUCCESS:
        ready[0] = NULL
    if graph[0] != NULL and context.table.cuGraphDestroy(graph[0]) == CUDA_SUCCESS:
        graph[0] = NULL
    context_leave(context)


def record_all_work(Event event not None):
    """Record an event after all work that is queued on its device; False: this driver cannot.

    Raises
    ------
    DriverError
        The driver refused, for example because a stream of the device captures a graph.
    """
    cdef DeviceContext* context
    require_usable(event.driver_device)
    if event.driver_device.context.table.cuCtxRecordEvent == NULL:
        return False
    context = enter(event.driver_device, "cuCtxRecordEvent")
    return leave(context, context.table.cuCtxRecordEvent(context.primary, event.handle),
                 "cuCtxRecordEvent")


# ---- around a call of the driver -----------------------------------------------------------------

cdef DeviceContext* enter(DriverDevice driver_device, str call) except NULL:
    """Make the device of a stream or an event current; `leave` ends that, and reports the call."""
    require_usable(driver_device)
    device_enter(&driver_device.context, call)
    return &driver_device.context


cdef bint leave(DeviceContext* context, CUresult code, str call) except -1:
    # Only a query may be "not ready": False. Another code is an error.
    cdef bint is_ready = code != CUDA_ERROR_NOT_READY
    device_leave(context, code if is_ready else CUDA_SUCCESS, call)
    return is_ready


cdef int wait_for_event(DriverDevice driver_device, CUstream stream, Event event) except -1:
    # The stream waits on the device.
    cdef DeviceContext* context = enter(driver_device, "cuStreamWaitEvent")
    cdef CUresult code
    with nogil:
        code = context.table.cuStreamWaitEvent(stream, event.handle, 0)
    leave(context, code, "cuStreamWaitEvent")
    return 0


cdef int require_usable(DriverDevice driver_device) except -1:
    if driver_device is None:
        raise ValueError("this stream or event was not initialised")
    if context_is_dead(&driver_device.context):
        raise ClosedError("this stream or event belongs to the parent process")
    return 0


# ---- one stream after another --------------------------------------------------------------------

cdef CUresult stream_follow(DeviceContext* here, CUstream earlier, DeviceContext* there,
                            CUstream later) noexcept nogil:
    cdef CUevent event
    cdef bint earlier_captures = False
    cdef bint later_captures = False
    # A graph under capture cannot wait for work outside of it, and other work cannot wait for a
    # graph before it is launched: the caller orders its launch.
    cdef CUresult code = stream_is_capturing(here, earlier, &earlier_captures)
    if code == CUDA_SUCCESS:
        code = stream_is_capturing(there, later, &later_captures)
    if code != CUDA_SUCCESS or earlier_captures != later_captures:
        return code
    code = here.table.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    if code != CUDA_SUCCESS:
        return code
    code = here.table.cuEventRecord(event, earlier)
    if code == CUDA_SUCCESS and there != here:
        code = context_enter(there)
    if code == CUDA_SUCCESS:
        code = there.table.cuStreamWaitEvent(later, event, 0)
        if there != here:
            context_leave(there)
    here.table.cuEventDestroy(event)        # the driver keeps it until its waits are done
    return code


cdef CUresult stream_is_capturing(DeviceContext* context, CUstream stream,
                                  bint* capturing) noexcept nogil:
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code
    if context.table.cuStreamIsCapturing == NULL:
        return CUDA_SUCCESS
    code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuStreamIsCapturing(stream, &status)
        context_leave(context)
    capturing[0] = status != CU_STREAM_CAPTURE_STATUS_NONE
    return code


cdef bint is_capturing(DriverDevice driver_device, CUstream stream) except -1:
    cdef bint capturing = False
    cdef CUresult code = stream_is_capturing(&driver_device.context, stream, &capturing)
    check(driver_device.context.table, code, "cuStreamIsCapturing")
    return capturing


# ---- streams of any library ----------------------------------------------------------------------

cdef int stream_handle(object stream, DriverDevice driver_device, CUstream* handle) except -1:
    if stream is None:
        handle[0] = NULL
        return 0
    if isinstance(stream, Stream):
        if (<Stream>stream).driver_device is not driver_device:
            raise ValueError(
                f"{stream!r} is not a stream of {driver_device.type}:{driver_device.ordinal}")
        handle[0] = (<Stream>stream).handle
        return 0
    handle[0] = <CUstream>checked_handle(_native_handle(stream))
    return 0


cdef uintptr_t checked_handle(object value) except? 0:
    number = -1 if isinstance(value, bool) or not hasattr(value, "__index__") else index(value)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"stream handle {value!r} is not an integer from 0 to 2**64 - 1")
    return number


# Attributes of memory objects that streams do not have, though both may have a `ptr`.
_MEMORY = ("nbytes", "size", "mem", "memory", "__dlpack__", "__cuda_array_interface__",
           "__array_interface__")


def _native_handle(stream):
    """Read the handle of a stream object of any library."""
    if isinstance(stream, bool):
        raise _no_stream(stream)
    if hasattr(stream, "__index__"):        # NumPy's integers too
        return _index(stream, stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method by the protocol; some libraries made it an attribute.
        pair = protocol() if callable(protocol) else protocol
        try:
            _, value = pair
        except (TypeError, ValueError) as error:
            raise TypeError(f"{stream!r}: __cuda_stream__ is no pair of version and "
                            "handle") from error
        return _index(value, stream)
    if isinstance(stream, Event) or any(hasattr(stream, name) for name in _MEMORY):
        raise _no_stream(stream)
    for attribute in ("cuda_stream", "ptr", "handle"):      # torch, CuPy, Numba
        value = getattr(stream, attribute, None)
        if value is not None:
            return _index(getattr(value, "value", value) or 0, stream)
    raise _no_stream(stream)


cdef bint keeps_itself(object stream) noexcept:
    return isinstance(stream, Stream) and (<Stream>stream).owned


cdef object device_of_stream(object stream):
    """Return the device that a stream of any library is on; None where it does not say."""
    if isinstance(stream, Stream):
        return stream.device
    where = getattr(stream, "device", None)             # torch's and cuda.core's
    for holder, attribute in ((where, "index"), (where, "device_id"), (stream, "device_id")):
        number = getattr(holder, attribute, None)       # the last is CuPy's; -1: it does not know
        if isinstance(number, int) and number >= 0:
            return Device(f"cuda:{number}")
    if stream is None or hasattr(stream, "__index__"):
        return None
    if sum(each.type == "cuda" for each in devices()) != 1:
        return None
    _native_handle(stream)      # raises for anything but a stream
    return Device("cuda:0")     # only CUDA's streams have objects of other libraries


def _index(value, stream):
    try:
        return index(value)
    except TypeError as error:
        raise _no_stream(stream) from error


def _no_stream(stream):
    return TypeError(f"{stream!r} is not a stream: expected None, a gpumem.Stream, an integer "
                     "handle or an object with __cuda_stream__")


# ---- the order of accesses to a buffer -----------------------------------------------------------

cdef inline CUstream normal(CUstream stream) noexcept nogil:
    return stream if stream != NULL else <CUstream><uintptr_t>LEGACY_STREAM


cdef CUstream own_stream(Buffer buffer) noexcept:
    return normal(<CUstream><uintptr_t>buffer.home.stream_at(buffer.slot))


cdef int order_host_slowly(Buffer buffer) except -1:
    # Accesses are counted before the wait; the next wait is for those that another thread adds.
    cdef uint64_t seen = buffer.queued
    require_open(buffer)    # this comes first: a wait is useless if the memory is not there
    require_alive(&buffer.home.driver_device.context)
    buffer.home.before_cpu(buffer)
    wait_for_stream(&buffer.home.driver_device.context, own_stream(buffer))
    for use in uses_of(buffer):
        (<QueuedUse>use).event.synchronize()
    forget_done(buffer)
    buffer.awaited = max(buffer.awaited, seen + 1)
    return 0


cdef int order_view(Buffer buffer) except -1:
    if buffer.queued == 0 and not has_uses(buffer):
        return buffer.home.before_cpu(buffer)
    return order_host_writing(buffer)


cdef int order_stream(Buffer buffer, CUstream stream, DriverDevice driver_device=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.home.before_stream(buffer, stream, driver_device or own)
    for use in uses_of(buffer):
        follow_use(use, driver_device or own, normal(stream))
    if driver_device is not None and driver_device.type != own.type:
        # The CPU waits below. No work is queued yet, so Ctrl-C may end that wait.
        wait_for_stream(&own.context, own_stream(buffer))
    return follow(driver_device or own, stream, own, own_stream(buffer))


cdef int order_read(Buffer buffer, CUstream stream, DriverDevice driver_device=None,
                    object named=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.queued += 1
    return join(buffer, driver_device or own, stream, named)


cdef int order_written(Buffer buffer, CUstream stream, DriverDevice driver_device=None,
                       object named=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.queued += 1
    buffer.written = buffer.queued
    return join(buffer, driver_device or own, stream, named)


cdef int join(Buffer buffer, DriverDevice driver_device, CUstream stream, object named) except -1:
    # Orders later work for the buffer after the work on `stream`.
    if buffer.home.is_streamless:
        return note_use(buffer, driver_device, normal(stream))
    if is_apart(buffer, driver_device, stream, named):
        buffer.record_stream(named)
        return note_use(buffer, driver_device, normal(stream), named)
    return follow(buffer.home.driver_device, own_stream(buffer), driver_device, stream)


cdef bint is_apart(Buffer buffer, DriverDevice driver_device, CUstream stream,
                   object named) except -1:
    # Whether the own stream is a default stream, to which work on `stream` is not to be joined. The
    # block is freed after it only if an object keeps the stream, and the memory is gpumem's.
    cdef CUstream own = own_stream(buffer)
    if (named is None or own == normal(stream) or buffer.home.driver_device is not driver_device
            or buffer.home.is_borrowed or hasattr(named, "__index__")
            or (isinstance(named, Stream) and not keeps_itself(named))):
        return False
    return ((own == normal(NULL) or own == <CUstream><uintptr_t>PER_THREAD_STREAM)
            and not is_capturing(driver_device, stream))


cdef int order_before(Buffer dst, Buffer src, CUstream stream,
                      DriverDevice driver_device) except -1:
    # Each of two buffers that share a stream may have more to wait for, such as its producer.
    order_stream(src, stream, driver_device)
    if are_together(dst, src):
        return dst.home.before_stream(dst, stream, driver_device)
    return order_stream(dst, stream, driver_device)


cdef int order_after(Buffer dst, Buffer src, CUstream stream, DriverDevice driver_device,
                     object named) except -1:
    cdef bint together = are_together(dst, src) and not is_apart(dst, driver_device, stream, named)
    src.queued += 1
    order_written(dst, stream, driver_device, named)
    if not together:
        order_read(src, stream, driver_device, named)
    return 0


cdef bint are_together(Buffer a, Buffer b) noexcept:
    return (a.home.driver_device is b.home.driver_device and own_stream(a) == own_stream(b)
            and not a.home.is_streamless and not a.home.queued_uses
            and not b.home.is_streamless and not b.home.queued_uses and a.block_bytes != 0)


cdef void order_settled(Buffer buffer) noexcept:
    buffer.awaited = buffer.queued + 1


cdef int wait_for_stream(DeviceContext* context, CUstream stream) except -1:
    # Another thread's default stream has no handle here: wait for the whole device.
    if stream == <CUstream><uintptr_t>PER_THREAD_STREAM:
        return synchronize_device(context)
    return synchronize_stream(context, stream)


cdef int finish_stream(DeviceContext* context, CUstream stream) except -1:
    cdef CUresult code
    device_enter(context, "cuStreamSynchronize")
    with nogil:
        if stream == <CUstream><uintptr_t>PER_THREAD_STREAM:
            code = context.table.cuCtxSynchronize()
        else:
            code = context.table.cuStreamSynchronize(stream)
    return device_leave(context, code, "cuStreamSynchronize")


cdef int follow(DriverDevice later_device, CUstream later, DriverDevice earlier_device,
                CUstream earlier) except -1:
    """Make the stream `later` wait, on the device, for all work queued on `earlier` so far."""
    cdef CUresult code
    later = normal(later)
    earlier = normal(earlier)
    if (later_device is earlier_device and later == earlier
            and later != <CUstream><uintptr_t>PER_THREAD_STREAM):
        return 0
    require_alive(&later_device.context)
    require_alive(&earlier_device.context)
    if later_device.type != earlier_device.type:
        return finish_stream(&earlier_device.context, earlier)
    if earlier == <CUstream><uintptr_t>PER_THREAD_STREAM:
        # It may be another thread's: the legacy stream is ordered after all of those.
        earlier = <CUstream><uintptr_t>LEGACY_STREAM
    device_enter(&earlier_device.context, "cuStreamWaitEvent")
    with nogil:
        code = stream_follow(&earlier_device.context, earlier, &later_device.context, later)
    return device_leave(&earlier_device.context, code, "cuStreamWaitEvent")


# ---- work that the own stream does not order -----------------------------------------------------

cdef bint has_uses(Buffer buffer) noexcept:
    cdef QueuedUse use
    for use in buffer.home.queued_uses or ():
        if is_of(use, buffer):
            return True
    return False


cdef list uses_of(Buffer buffer):
    # Two tensors over the same bytes are two buffers, with one list.
    return [use for use in buffer.home.queued_uses or () if is_of(use, buffer)]


cdef inline bint is_of(QueuedUse use, Buffer buffer) noexcept:
    return use.low < buffer.address + buffer.requested_bytes and use.high > buffer.address


cdef int note_use(Buffer buffer, DriverDevice driver_device, CUstream stream,
                  object named=None) except -1:
    cdef QueuedUse use, known = None
    cdef list uses
    # A graph under capture has done no work yet: the caller orders its launch.
    if is_capturing(driver_device, stream):
        return 0
    if buffer.home.queued_uses is None:
        buffer.home.queued_uses = []
    uses = buffer.home.queued_uses
    if isinstance(named, Stream):
        # It is kept, so its handle names no other stream. The event after this use is after an
        # earlier use, too.
        for use in uses:
            if (use.low == buffer.address and use.high == use.low + buffer.requested_bytes
                    and use.driver_device is driver_device and use.stream == stream):
                known = use
    else:
        device = Device(f"{driver_device.type}:{driver_device.ordinal}")
        named = Stream.from_handle(device, <uintptr_t>stream)
    if known is None:
        forget_done(buffer)
        known = QueuedUse.__new__(QueuedUse)
        known.low = buffer.address
        known.high = known.low + buffer.requested_bytes
        known.driver_device = driver_device
        known.stream = stream
    known.event = named.record(known.event)
    # Another thread may have found the earlier use done meanwhile, and forgotten it.
    if known not in uses:
        uses.append(known)
    return 0


cdef int forget_done(Buffer buffer) except -1:
    # Finished work orders nothing any more. Other threads may append to the list during a query.
    cdef list uses = buffer.home.queued_uses
    for use in list(uses or ()):
        if (<QueuedUse>use).event.query() and use in uses:
            uses.remove(use)
    return 0


cdef int follow_use(QueuedUse use, DriverDevice driver_device, CUstream stream) except -1:
    if (use.driver_device is driver_device and use.stream == stream
            and stream != <CUstream><uintptr_t>PER_THREAD_STREAM):
        return 0
    require_alive(&driver_device.context)
    if use.driver_device.type != driver_device.type:
        use.event.synchronize()
        return 0
    return 0 if is_capturing(driver_device, stream) else wait_for_event(
        driver_device, stream, use.event)


cdef int require_alive(DeviceContext* context) except -1:
    if context_is_dead(context):
        raise ClosedError("this memory belongs to the parent process, or the interpreter is ending")
    return 0

"""Timelines: what all kinds share, points of them, and the two kinds.

`HostTimeline` is in shared memory; `DriverTimeline` is one that another API made.
"""

import errno as codes
import fcntl
import os
from operator import index

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.string cimport memset

from gpumem._buffer cimport device_of_stream, Stream, stream_handle
from gpumem._native.driver cimport (
    check, context_enter, context_is_dead, context_leave,
    CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
    CUDA_SUCCESS, CUresult, CUstream, DeviceContext, DriverDevice, require,
)
from gpumem._resource cimport Handle, handle_of
from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, mmap, munmap, PROT_READ, PROT_WRITE
from gpumem._support.process cimport process
from gpumem.interop.timelines._core cimport (
    core_after_fork, CORE_DESERTED, CORE_DRIVER, core_enqueue_signal, core_enqueue_wait, CORE_LATE,
    core_list, CORE_LOST, core_make_link, core_new, CORE_NO_MEMORY, CORE_NOT_ABOVE, CORE_OK,
    core_pending, CORE_POISONED, CORE_REMOVED, core_retire, core_signal, core_signal_by_stream,
    core_wait, core_wait_begin, core_wait_end, core_wait_go_on, core_wait_idle, Outcome,
    rehearse_memory_operations, release_retired_cores, timeline_is_poisoned, TIMELINE_LARGEST,
    timeline_look, timeline_now, TIMELINE_OK, timeline_own_file, timeline_page_build,
    TIMELINE_PAGE_BYTES, timeline_page_is_ours, timeline_poison, TIMELINE_REMOVED, timeline_value,
    TimelineCore, TimelinePage,
)

from gpumem._resource.handle import received_handle
from gpumem._support.releases import on_release
from gpumem._support.signatures import ClassSignature
from gpumem.device import Device
from gpumem.errors import (
    BadHandleError, ClosedError, DeviceMismatchError, DriverError, InUseError, NonMonotonicError,
    TimelineLostError, TimelineTimeout, UnsupportedHandleTypeError,
)
from gpumem.interop.descriptors import duplicate, seconds_of, SemaphoreType


cdef enum:
    # ns after which a wait checks for signals of the system and for dead processes.
    SLICE = 100_000_000
    # ns for which it polls before it sleeps: sleeping and waking costs about as much.
    SPIN = 5_000

cdef uint64_t FOREVER = <uint64_t>-1
cdef uint64_t spin_time = SPIN if (os.cpu_count() or 1) > 1 else 0


@cython.no_gc_clear
cdef class Timeline:
    """A counter that only rises, by which streams, the CPU and other programs wait for each other.

    Made by `HostTimeline.create`, by `HostTimeline.from_fd` and by importing one
    (`Importer.import_semaphore`). A wait for a value is over when the counter is at least that.

    Values are integers from 1 to 2**63 - 1. Each signal's value must be above every value that this
    process has signalled, queued or seen before; that is checked before the driver is called,
    atomically over threads. Signals take effect in the order in which they were made: one that is
    queued on a stream while an earlier one still waits in another stream comes after it.

    Methods named ``enqueue...`` never block the CPU. A wait may be queued before its signal. If the
    value is never signalled, the stream blocks for ever, and so do driver calls that wait for the
    stream, such as freeing memory. Operations that were queued on a stream before a fork belong to
    the parent.

    Safe to use from many threads. A timeline that is dropped while streams still use it is released
    by a later call of gpumem.

    Attributes
    ----------
    device : Device or None
        Its streams are of this device; None: of any.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.interop import HostTimeline
    >>> timeline, stream = HostTimeline.create(), gpumem.Stream("host")
    >>> timeline.enqueue_signal(stream, 1)       # after the stream's earlier work
    >>> timeline.wait(1)
    >>> timeline.value()
    1
    """

    cdef TimelineCore* core         # NULL: closed
    cdef readonly object device     # the one that its streams belong to; None: any device
    cdef DriverDevice driver_device         # that device; None: any
    cdef int inside                 # threads in a call without the interpreter lock
    cdef bint imported              # closed in a forked child
    cdef object __weakref__

    def __init__(self):
        raise TypeError("a timeline is made by HostTimeline.create or from_fd, or imported")

    def __dealloc__(self):
        if self.core != NULL:
            core_retire(self.core)

    # ---- state ----

    @property
    def closed(self):
        """Whether it was closed."""
        return self.core == NULL

    @property
    def pending(self):
        """The highest value that was signalled or is queued to be, as far as this process knows.

        Of a HostTimeline: by any process. A higher value has no signal queued yet.
        """
        self.enter()
        return core_pending(self.core)

    def value(self):
        """Return the value that has been reached.

        Raises
        ------
        UnsupportedHandleTypeError
            The driver cannot read an imported timeline.
        TimelineLostError
            The device that it belongs to was removed.
        """
        self.enter()
        if self.core.page == NULL:
            raise UnsupportedHandleTypeError(
                f"the value of {self!r} cannot be read: the driver of {self.device} has no "
                "function for it")
        value = timeline_value(self.core.page)
        if value == TIMELINE_REMOVED:
            raise TimelineLostError("the device of this timeline was removed")
        return value

    def point(self, value):
        """Return one value of this timeline as an object that streams and programs wait for.

        Parameters
        ----------
        value : int

        Returns
        -------
        TimelinePoint
        """
        self.enter()
        return TimelinePoint(self, value)

    # ---- the CPU ----

    def wait(self, value, timeout=None):
        """Block the calling thread until a value is reached.

        Polls for some 5 us, then sleeps. Where only the driver can read the value, a stream of the
        timeline's own waits, and the CPU polls that stream; a wait that timed out stays queued
        there until the value is reached, and `close` raises InUseError until then.

        Parameters
        ----------
        value : int
        timeout : float, optional
            Seconds; 0 only polls, None waits for ever.

        Raises
        ------
        TimelineTimeout
            The value was not reached in time.
        TimelineLostError
            It cannot be: the timeline was poisoned, its device removed, a device that uses it on
            streams lost (which poisons it), or a process that used it died and this process is the
            only one left.
        NonMonotonicError
            `value` is out of range.
        ClosedError
        """
        cdef uint64_t number = value_in(value, 1, "value")
        cdef uint64_t deadline = deadline_of(timeout)
        self.enter()
        if self.core.page != NULL and timeline_look(self.core.page, number) == TIMELINE_OK:
            return
        self.inside += 1
        try:
            if self.core.page == NULL:
                wait_by_stream(self, number, deadline, timeout)
            else:
                wait_for_page(self, number, deadline, timeout)
        finally:
            self.inside -= 1

    def signal(self, value):
        """Set the value now.

        If a GPU has yet to store a lower value, the call waits for that first. Where only the
        driver can read the value, the signal is queued on a stream of the timeline's own. A
        poisoned timeline accepts signals, so that streams which wait for it can continue; only
        after a store that may still come.

        Parameters
        ----------
        value : int

        Raises
        ------
        NonMonotonicError
            The value is not above every known one, or out of range.
        TimelineLostError
            A device that had yet to store a lower value is lost, or the process that queued that
            store has died and no other one uses the timeline. This poisons the timeline, and the
            next signal is accepted. Or the timeline was poisoned before that store.
        ClosedError
        """
        cdef Outcome out
        cdef uint64_t number = value_in(value, 1, "value")
        cdef int status
        self.enter()
        self.inside += 1
        try:
            if self.core.page == NULL:
                with nogil:
                    status = core_signal_by_stream(self.core, &self.driver_device.context, number,
                                                   &out)
            else:
                status = core_signal(self.core, number, 0, &out)
                while status == CORE_LATE:      # a device has yet to store a lower value
                    PyErr_CheckSignals()
                    with nogil:
                        status = core_signal(self.core, number, timeline_now() + SLICE, &out)
        finally:
            self.inside -= 1
        report(self, status, &out, number)

    # ---- streams ----

    def enqueue_wait(self, stream, value):
        """Make a stream's later work wait, on the device, until a value is reached.

        Makes no driver call if the value is known to be reached already.

        Parameters
        ----------
        stream : Stream, int or object
            None is the device's legacy default stream. A handle or another library's stream needs a
            timeline that has a `device`.
        value : int

        Raises
        ------
        DeviceMismatchError
            The stream is another device's.
        NonMonotonicError
            `value` is out of range.
        DriverError
            The driver refused, or the stream is capturing a graph. Nothing was queued.
        TimelineLostError
            The timeline was poisoned, or its device removed.
        ClosedError
        """
        enqueue(self, core_enqueue_wait, stream, value)

    def enqueue_signal(self, stream, value):
        """Signal a value on the device, when the stream's earlier work is done.

        Parameters
        ----------
        stream : Stream, int or object
            As for `enqueue_wait`.
        value : int

        Raises
        ------
        NonMonotonicError
            The value is not above every known one, or out of range.
        DeviceMismatchError, DriverError, TimelineLostError, ClosedError
            As `enqueue_wait` raises them.
        """
        enqueue(self, core_enqueue_signal, stream, value)

    # ---- the end ----

    def export(self):
        """Return an owning `Handle` of it, for another process.

        Raises
        ------
        UnsupportedHandleTypeError
            It was imported: only its exporter can export it.
        """
        self.enter()
        raise UnsupportedHandleTypeError(
            f"{self!r} was imported: only the program that made it can export it")

    def close(self, *, timeout=None):
        """Close it here. Idempotent; other processes keep using it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for streams that still have a wait or signal of it queued; None: 0.

        Raises
        ------
        InUseError
            There is such a stream, or a thread in a call; the timeline stays open.
        """
        cdef uint64_t deadline = 0 if timeout is None else deadline_of(timeout)
        cdef int status = CORE_OK
        if self.core == NULL:
            return
        if not is_parents(self):
            refuse_if_inside(self)
            status = wait_until_idle(self, deadline)
            refuse_if_inside(self)
        if self.core == NULL:
            return          # another thread closed it during the wait
        if status == CORE_LATE:
            raise InUseError(
                f"{self!r} is in use: a stream still has a wait for it or a signal of it queued; "
                "synchronize the stream first")
        self.retire()

    cdef void retire(self):
        cdef TimelineCore* core = self.core
        self.core = NULL
        core_retire(core)
        with nogil:
            release_retired_cores()

    def __enter__(self):
        self.enter()
        return self

    def __exit__(self, *exception):
        # Streams that still use it finish their work: leaving a block raises nothing.
        if self.core != NULL and (self.inside == 0 or is_parents(self)):
            self.retire()

    def __reduce__(self):
        raise TypeError(f"cannot pickle {self!r}: send the Handle that export() returns")

    def __repr__(self):
        state = "closed" if self.core == NULL else "open"
        where = "" if self.device is None else f" of {self.device}"
        return f"<gpumem.interop.{type(self).__name__}{where} {state}>"

    # ---- below ----

    cdef int enter(self) except -1:
        """Make it usable by this process, or raise ClosedError."""
        if self.core == NULL:
            raise ClosedError("this timeline is closed")
        if self.core.generation != process.generation:
            after_fork(self)
        return 0


# ---- Calls on streams ----------------------------------------------------------------------------

# core_enqueue_wait or core_enqueue_signal.
ctypedef int (*stream_operation)(TimelineCore* core, DeviceContext* context, CUstream stream,
                                 uint64_t value, Outcome* out) noexcept nogil


cdef int enqueue(Timeline timeline, stream_operation operation, object stream,
                 object value) except -1:
    cdef Outcome out
    cdef CUstream handle
    cdef int status
    cdef uint64_t number = value_in(value, 1, "value")
    cdef DriverDevice driver_device = stream_of(timeline, stream, &handle)
    timeline.enter()            # again: reading the stream may have run other code
    timeline.inside += 1
    with nogil:
        release_retired_cores()
        status = operation(timeline.core, &driver_device.context, handle, number, &out)
    timeline.inside -= 1
    if status == CORE_DRIVER:
        raise_driver(driver_device, &out)
    return report(timeline, status, &out, number)


cdef DriverDevice stream_of(Timeline timeline, object stream, CUstream* handle):
    timeline.enter()
    cdef DriverDevice driver_device = timeline.driver_device
    cdef DriverDevice of_stream
    if isinstance(stream, Stream):
        of_stream = (<Stream>stream).driver_device
        if of_stream is not None and context_is_dead(&of_stream.context):
            raise ClosedError("this stream belongs to the parent process")
        if driver_device is not None and of_stream is not driver_device:
            raise DeviceMismatchError(f"{stream!r} is not a stream of {timeline.device}, which "
                                      "this timeline belongs to")
        if of_stream is None:
            raise ValueError("this stream was not initialised")
        driver_device = of_stream
    elif driver_device is None:
        device = device_of_stream(stream)
        if device is None:
            raise TypeError(f"the device of stream {stream!r} is unknown, and this timeline "
                            "has none: expected a gpumem.Stream, or another library's stream "
                            "object with a device")
        driver_device = device._open()
    stream_handle(stream, driver_device, handle)
    return driver_device


# ---- Waits of the CPU: in slices, between which signals of the system are handled ----------------

cdef int wait_for_page(Timeline timeline, uint64_t value, uint64_t deadline,
                       object timeout) except -1:
    cdef Outcome out
    cdef uint64_t spin = spin_time
    cdef int status
    while True:
        with nogil:
            status = core_wait(timeline.core, value, min(deadline, timeline_now() + SLICE), spin,
                               &out)
        if status != CORE_LATE or timeline_now() >= deadline:
            return report(timeline, status, &out, (value, timeout))
        spin = 0
        PyErr_CheckSignals()


cdef int wait_by_stream(Timeline timeline, uint64_t value, uint64_t deadline,
                        object timeout) except -1:
    cdef Outcome out
    cdef CUstream stream
    cdef DeviceContext* context = &timeline.driver_device.context
    cdef int status
    with nogil:
        status = core_wait_begin(timeline.core, context, &stream, value, &out)
    report(timeline, status, &out, value)
    try:
        while True:
            with nogil:
                status = core_wait_go_on(context, stream, min(deadline, timeline_now() + SLICE),
                                         &out)
            if status != CORE_LATE or timeline_now() >= deadline:
                return report(timeline, status, &out, (value, timeout))
            PyErr_CheckSignals()
    finally:
        with nogil:
            core_wait_end(context, stream)


cdef int wait_until_idle(Timeline timeline, uint64_t deadline) except -1:
    cdef int status
    timeline.inside += 1
    try:
        while True:
            with nogil:
                status = core_wait_idle(timeline.core, min(deadline, timeline_now() + SLICE))
            if status == CORE_OK or timeline_now() >= deadline:
                return status
            PyErr_CheckSignals()
    finally:
        timeline.inside -= 1


# ---- Use by threads and forks --------------------------------------------------------------------

cdef int refuse_if_inside(Timeline timeline) except -1:
    if timeline.inside != 0:
        raise InUseError(f"{timeline!r} is in use: another thread is in a call of it")
    return 0


cdef bint is_parents(Timeline timeline):
    # Then its driver objects are the parent's, and so are the threads that `inside` counts.
    return timeline.core.generation != process.generation


cdef int after_fork(Timeline timeline) except -1:
    if timeline.imported:
        raise ClosedError(f"{timeline!r} belongs to the parent process")
    core_after_fork(timeline.core)
    timeline.inside = 0
    if timeline.device is not None:
        timeline.driver_device = timeline.device._open()
    return 0


# ---- Errors and arguments ------------------------------------------------------------------------

cdef int report(Timeline timeline, int status, Outcome* out, object value) except -1:
    # Raise the error of a status. `value` is the requested one, or (value, timeout) of a wait.
    if status == CORE_OK:
        return 0
    if status == CORE_NOT_ABOVE:
        raise NonMonotonicError(
            f"{value} is not above {out.known}, which was signalled or queued before",
            value=value, known=out.known)
    if status == CORE_LATE:
        value, timeout = value
        raise TimelineTimeout(f"{timeline!r} did not reach {value} in {timeout} s"
                              + progress(timeline))
    if status == CORE_POISONED:
        raise TimelineLostError(f"{timeline!r} was poisoned: make a new one" + progress(timeline))
    if status == CORE_REMOVED:
        raise TimelineLostError(f"the device of {timeline!r} was removed")
    if status == CORE_LOST:
        return raise_loss(timeline, out)
    if status == CORE_DESERTED:
        raise TimelineLostError(f"process {out.process} died, and no other process is left to "
                                f"signal {timeline!r}" + progress(timeline))
    if status == CORE_DRIVER:
        return raise_driver(timeline.driver_device, out)
    if status == CORE_NO_MEMORY:
        raise MemoryError("out of host memory while using a timeline")
    raise OSError(out.system, os.strerror(out.system), out.call.decode())


cdef str progress(Timeline timeline):
    if timeline.core == NULL or timeline.core.page == NULL:
        return ""
    return f"; its value is {timeline_value(timeline.core.page)}"


cdef int raise_loss(Timeline timeline, Outcome* out) except -1:
    try:
        return check(out.context.table, out.code, "cuEventQuery")
    except DriverError as error:
        raise TimelineLostError(f"a device that uses {timeline!r} on its streams is lost"
                                f"{progress(timeline)}: {error}") from error


cdef int raise_driver(DriverDevice driver_device, Outcome* out) except -1:
    return check(driver_device.context.table, out.code, out.call.decode())


cdef uint64_t value_in(object value, uint64_t lowest, str name) except? 0:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a timeline's value is an integer, not {value!r}")
    number = index(value)
    if not lowest <= number <= TIMELINE_LARGEST:
        raise NonMonotonicError(f"{name} {number} is not from {lowest} to 2**63 - 1", value=number)
    return number


cdef uint64_t deadline_of(object timeout) except? 0:
    """Return the end of a timeout in seconds, in ns of the monotonic clock."""
    cdef double seconds = 2e9 if timeout is None else seconds_of(timeout)
    return FOREVER if seconds > 1e9 else timeline_now() + <uint64_t>(seconds * 1e9)


@cython.final
cdef class TimelinePoint:
    """One value of a timeline: what `Stream.wait` waits for, and what `set_ready` records.

    Parameters
    ----------
    timeline : Timeline
    value : int

    Attributes
    ----------
    timeline : Timeline
    value : int

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.interop import HostTimeline
    >>> timeline = HostTimeline.create()
    >>> stream = gpumem.Stream("host")
    >>> stream.wait(timeline.point(1))
    >>> stream.query()
    False
    >>> timeline.signal(1)
    >>> stream.synchronize()
    """

    __signature__ = ClassSignature()

    cdef readonly Timeline timeline
    cdef readonly object value

    def __init__(self, Timeline timeline not None, value):
        """Take the arguments that the class describes."""
        self.timeline = timeline
        self.value = value_in(value, 1, "value")

    def wait(self, timeout=None):
        """Block the calling thread until it is reached; see `Timeline.wait`."""
        self.timeline.wait(self.value, timeout)

    def enqueue_wait(self, stream):
        """Make a stream wait for it; see `Timeline.enqueue_wait`."""
        self.timeline.enqueue_wait(stream, self.value)

    def __eq__(self, other):
        if not isinstance(other, TimelinePoint):
            return NotImplemented
        return (self.timeline is (<TimelinePoint>other).timeline
                and self.value == (<TimelinePoint>other).value)

    def __hash__(self):
        return hash((id(self.timeline), self.value))

    def __repr__(self):
        return f"<gpumem.interop.TimelinePoint {self.value} of {self.timeline!r}>"


def _release_retired(bint may_wait):
    if may_wait:        # the driver unregisters their pages when the device is idle
        with nogil:
            release_retired_cores()


on_release("timelines", _release_retired)


# ---- Timelines in shared memory ------------------------------------------------------------------

@cython.final
cdef class HostTimeline(Timeline):
    """A timeline in a page of memory that other processes, and the streams of any device, share.

    The page is a sealed file in memory. The CPU waits with a futex and does not poll unless a GPU
    signals; then it polls every 250 us, because a store of a GPU wakes no thread. Streams of a GPU
    wait for the page and store to it by stream memory operations; the page is registered with the
    driver when a device first uses it. Streams of the host device access it as the CPU does.

    It can be sent through `multiprocessing`, and stays usable in a forked child.

    A wait of the CPU fails, within about 0.1 s, if a process that used the timeline ended without
    closing it and the waiting process is the only one left, in whichever PID namespaces they are.
    Processes after the first 112, those without a /proc, and those that hang count as alive. A
    process uses the timeline from its first call on.

    Examples
    --------
    >>> from gpumem.interop import HostTimeline
    >>> timeline = HostTimeline.create()
    >>> there = HostTimeline.from_fd(timeline.export())     # in another process, perhaps
    >>> there.signal(1 << 40)
    >>> timeline.wait(7)
    >>> timeline.value() == timeline.pending == 1 << 40
    True
    """

    @staticmethod
    def create(initial=0, device=None):
        """Make a timeline.

        Parameters
        ----------
        initial : int
            Its value, from 0 to 2**63 - 1.
        device : Device or str, optional
            Only streams of this device may use it; needed for streams that are handles or another
            library's. None: streams of any device, as `Stream` objects.

        Raises
        ------
        NonMonotonicError
            `initial` is out of range.
        ValueError
            Unknown device.
        OSError
            The system is out of memory or descriptors.
        """
        cdef uint64_t first = value_in(initial, 0, "initial value")
        cdef DriverDevice driver_device = open_device(device)
        return open_timeline(create_file(), device, driver_device, &first)

    @staticmethod
    def from_fd(fd, device=None):
        """Open a timeline of another process, or of this one.

        Parameters
        ----------
        fd : int, Handle or object with ``fileno()``
            Result of `export`; the caller keeps it.
        device : Device or str, optional
            As in `create`.

        Raises
        ------
        BadHandleError
            It is not a descriptor of a timeline's page, or the file could still be shortened.
        TypeError, ValueError
            `fd` is not an integer, or negative; unknown device.
        """
        cdef DriverDevice driver_device = open_device(device)
        cdef Handle file
        number = fd.fileno() if hasattr(fd, "fileno") else fd
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise TypeError(f"a descriptor is an integer or has fileno(), not {fd!r}")
        file = duplicate(index(number))
        if not is_long(file) or not has_fixed_size(file):
            raise BadHandleError(codes.EINVAL, f"descriptor {number} is not a timeline: not a "
                                               f"sealed file of {TIMELINE_PAGE_BYTES} bytes")
        return open_timeline(file, device, driver_device, NULL)

    def export(self):
        """Return a `Handle` of it, for another process; the timeline lives as long as either.

        Returns
        -------
        Handle
            Its kind is ``SemaphoreType.HOST_TIMELINE``.

        Raises
        ------
        ClosedError
        OSError
            The system is out of descriptors.
        """
        return export_file(self, SemaphoreType.HOST_TIMELINE)

    @property
    def poisoned(self):
        """Whether it was declared lost."""
        self.enter()
        return timeline_is_poisoned(self.core.page)

    def poison(self):
        """Let every wait of the CPU for a value not yet reached fail with TimelineLostError.

        For a program that cannot signal a value which others wait for. Permanent, and for every
        process. Streams are not affected: they wait until a value is signalled.
        """
        self.enter()
        timeline_poison(self.core.page)

    def __reduce__(self):
        from multiprocessing.reduction import DupFd

        self.enter()        # a process that is being started inherits this very descriptor
        return _arrived, (DupFd(self.core.fd), self.device)


def _arrived(sent, device):
    # Nothing of a pickle is trusted: one may make a Device without its attributes.
    with received_handle(sent, SemaphoreType.HOST_TIMELINE, None) as handle:
        try:
            where = None if device is None else Device(device)
        except Exception as error:
            raise BadHandleError(codes.EINVAL, "the handle has an invalid device: expected a "
                                               "Device or None") from error
        try:
            return HostTimeline.from_fd(handle, where)
        except ValueError as error:
            raise DeviceMismatchError(f"the timeline's device is not here: {error}") from error


cdef bint values_are_hidden = False     # for tests


def _hide_values(bint on):
    """Let timelines that the host device imports from now on be unreadable, as CUDA's are."""
    global values_are_hidden
    values_are_hidden = on


def _rehearse_memory_operations(bint on):
    """Let streams of the host device use memory operations, as a GPU's do, from their first use."""
    rehearse_memory_operations(on)


cdef HostTimeline open_timeline(Handle file, object device, DriverDevice driver_device,
                                uint64_t* first):
    """Make the object, which takes over the file; a new page begins with the value `first`."""
    cdef HostTimeline timeline = HostTimeline.__new__(HostTimeline)
    cdef TimelinePage* page
    with nogil:
        release_retired_cores()
    page = map_page(file)
    if page == NULL:
        raise BadHandleError(errno, f"the timeline cannot be mapped: {os.strerror(errno)}")
    if first != NULL:
        timeline_page_build(page, first[0])
    if not timeline_page_is_ours(page):
        munmap(page, TIMELINE_PAGE_BYTES)
        raise BadHandleError(codes.EINVAL, "the descriptor is not a timeline: its page has no mark")
    timeline.core = core_new(page, file.fd)
    if timeline.core == NULL:
        munmap(page, TIMELINE_PAGE_BYTES)
        raise MemoryError("out of host memory while creating a timeline")
    file.fd = -1            # the core's now
    timeline.device = None if device is None else Device(device)
    timeline.driver_device = driver_device
    return timeline


cdef DriverDevice open_device(object device):
    return None if device is None else Device(device)._open()


# ---- Timelines that another API made -------------------------------------------------------------

@cython.final
cdef class DriverTimeline(Timeline):
    """A timeline that another API made: Vulkan, another process's driver.

    Belongs to the device that imported it. The CUDA driver cannot read the value, so `value`
    raises there, while `wait` and `signal` go through a stream of the timeline's own. Timelines of
    the host device are pages of memory, so the CPU does all of it itself. Closed after a fork.

    Examples
    --------
    >>> from gpumem.interop import DriverTimeline, HostTimeline, Importer
    >>> from gpumem.interop import SemaphoreDescriptor, SemaphoreType
    >>> made = HostTimeline.create()             # stands for one of Vulkan's
    >>> descriptor = SemaphoreDescriptor(made.export(), SemaphoreType.TIMELINE_OPAQUE_FD)
    >>> timeline = Importer.for_device("host").import_semaphore(descriptor)
    >>> timeline.signal(3)
    >>> isinstance(timeline, DriverTimeline), made.value()
    (True, 3)
    """

    def export(self):
        """Return a `Handle` of it, where it was imported by a descriptor that the CPU can read.

        Raises
        ------
        UnsupportedHandleTypeError
            Only the program that made it can export it.
        """
        self.enter()
        if self.core.fd < 0:
            return Timeline.export(self)
        return export_file(self, SemaphoreType.TIMELINE_OPAQUE_FD)


def import_fd(device, int fd):
    """Import a Vulkan timeline semaphore by its descriptor, which the caller keeps."""
    cdef CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc
    cdef Handle given = duplicate(fd)
    cdef DriverTimeline timeline = prepare(device, fd)
    memset(&desc, 0, sizeof(desc))
    desc.type = CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
    desc.handle.fd = given.fd
    complete(timeline, &desc)
    given.fd = -1           # the driver's now
    return timeline


cdef DriverTimeline prepare(object device, int fd):
    """Make all but the import, so that nothing has to be undone after it."""
    cdef DriverTimeline timeline = DriverTimeline.__new__(DriverTimeline)
    cdef DriverDevice driver_device = device._open()
    cdef TimelinePage* page = NULL
    cdef Handle file = None
    require(driver_device.context.table.cuImportExternalSemaphore, "cuImportExternalSemaphore",
            "a timeline of another API")
    with nogil:
        release_retired_cores()
    timeline.device = device
    timeline.driver_device = driver_device
    timeline.imported = True
    # The host device's semaphores are files of a page, which the CPU reads itself.
    if driver_device.context.is_host and not values_are_hidden:
        file = duplicate(fd)
        page = map_page(file) if is_long(file) else NULL
    timeline.core = core_new(page, -1 if page == NULL else file.fd)
    if timeline.core == NULL:
        if page != NULL:
            munmap(page, TIMELINE_PAGE_BYTES)
        raise MemoryError("out of host memory while creating a timeline")
    if page != NULL:
        file.fd = -1        # the core's now
    core_list(timeline.core)
    if core_make_link(timeline.core, &driver_device.context) == NULL:
        timeline.retire()
        raise MemoryError("out of host memory while creating a timeline")
    return timeline


cdef int complete(DriverTimeline timeline,
                  const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC* desc) except -1:
    cdef DriverDevice driver_device = timeline.driver_device
    cdef CUresult code
    with nogil:
        code = context_enter(&driver_device.context)
        if code == CUDA_SUCCESS:
            code = driver_device.context.table.cuImportExternalSemaphore(
                &timeline.core.links.semaphore, desc)
            context_leave(&driver_device.context)
    if code != CUDA_SUCCESS:
        timeline.retire()
    return check(driver_device.context.table, code, "cuImportExternalSemaphore")


# ---- Files that hold a timeline's page -----------------------------------------------------------

cdef Handle create_file():
    cdef int fd = os.memfd_create("gpumem timeline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    cdef Handle file = handle_of(fd, None, None)
    os.ftruncate(fd, TIMELINE_PAGE_BYTES)
    # A file that can shrink would let an access of the mapped page fault.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


cdef Handle export_file(Timeline timeline, object kind):
    # Return a new owner of a timeline's file, for another process.
    timeline.enter()
    fd = fcntl.fcntl(timeline.core.fd, fcntl.F_DUPFD_CLOEXEC, 3)
    # Another process with our open file description would keep us alive for all others.
    timeline_own_file(fd)
    return handle_of(fd, kind, None)


cdef TimelinePage* map_page(Handle file) noexcept:
    cdef void* page = mmap(NULL, TIMELINE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd,
                           0)
    return NULL if page == MAP_FAILED else <TimelinePage*>page


cdef bint is_long(Handle file):
    return os.fstat(file.fd).st_size >= TIMELINE_PAGE_BYTES


cdef bint has_fixed_size(Handle file):
    try:
        return fcntl.fcntl(file.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK != 0
    except OSError:         # not a file in memory
        return False

"""Timeline, the base of all kinds, and TimelinePoint: values, waits, signals and ends."""

import os
from operator import index

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t

from gpumem._buffer cimport device_of_stream, Stream, stream_handle
from gpumem._native.driver cimport check, context_is_dead, CUstream, DeviceContext, DriverDevice
from gpumem._support.process cimport process
from gpumem.interop.timelines._core cimport (
    core_after_fork, CORE_DESERTED, CORE_DRIVER, core_enqueue_signal, core_enqueue_wait, CORE_LATE,
    CORE_LOST, CORE_NO_MEMORY, CORE_NOT_ABOVE, CORE_OK, core_pending, CORE_POISONED, CORE_REMOVED,
    core_retire, core_signal, core_signal_by_stream, core_wait, core_wait_begin, core_wait_end,
    core_wait_go_on, core_wait_idle, Outcome, release_retired_cores, TIMELINE_LARGEST,
    timeline_look, timeline_now, TIMELINE_OK, TIMELINE_REMOVED, timeline_value, TimelineCore,
)

from gpumem._support.releases import on_release
from gpumem._support.signatures import ClassSignature
from gpumem.errors import (
    ClosedError, DeviceMismatchError, DriverError, InUseError, NonMonotonicError, TimelineLostError,
    TimelineTimeout, UnsupportedHandleTypeError,
)


cdef enum:
    # ns after which a wait looks for signals of the system and for dead processes.
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

    The methods whose names begin with ``enqueue`` never block the CPU. A wait may be queued before
    its signal. A stream whose value is never signalled blocks for ever, and so do driver calls that
    wait for the stream, such as freeing memory. Operations that were queued on a stream before a
    fork belong to the parent.

    Safe to use from many threads. A timeline that is dropped while streams still use it is released
    by a later call of gpumem.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.interop import HostTimeline
    >>> timeline, stream = HostTimeline.create(), gpumem.Stream("host")
    >>> timeline.enqueue_signal(stream, 1)       # behind what the stream has
    >>> timeline.wait(1)
    >>> timeline.value()
    1
    """

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
        there until the value is reached, and meanwhile `close` raises InUseError.

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
            It cannot be: the timeline was poisoned, its device removed, a device whose streams use
            it lost (which poisons it), or a process that used it died and this process is the only
            one left.
        NonMonotonicError
            `value` is out of range.
        ClosedError
        """
        cdef uint64_t number = value_in(value, 1, "value")
        cdef uint64_t deadline = deadline_of(timeout)
        self.enter()
        if self.core.page == NULL:
            wait_by_stream(self, number, deadline, timeout)
        elif timeline_look(self.core.page, number) != TIMELINE_OK:
            wait_for_page(self, number, deadline, timeout)

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
            return          # another thread closed it meanwhile
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
    cdef int status = CORE_LATE
    timeline.inside += 1
    try:
        while True:
            with nogil:
                status = core_wait(timeline.core, value, min(deadline, timeline_now() + SLICE),
                                   spin, &out)
            if status != CORE_LATE or timeline_now() >= deadline:
                break
            spin = 0
            PyErr_CheckSignals()
    finally:
        timeline.inside -= 1
    return report(timeline, status, &out, (value, timeout))


cdef int wait_by_stream(Timeline timeline, uint64_t value, uint64_t deadline,
                        object timeout) except -1:
    cdef Outcome out
    cdef CUstream stream
    cdef int status
    timeline.inside += 1
    try:
        with nogil:
            status = core_wait_begin(timeline.core, &timeline.driver_device.context, &stream, value,
                                     &out)
        report(timeline, status, &out, value)
        try:
            while True:
                with nogil:
                    status = core_wait_go_on(&timeline.driver_device.context, stream,
                                             min(deadline, timeline_now() + SLICE), &out)
                if status != CORE_LATE or timeline_now() >= deadline:
                    break
                PyErr_CheckSignals()
        finally:
            with nogil:
                core_wait_end(&timeline.driver_device.context, stream)
    finally:
        timeline.inside -= 1
    return report(timeline, status, &out, (value, timeout))


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
        raise TimelineLostError(f"a device whose streams use {timeline!r} is lost"
                                f"{progress(timeline)}: {error}") from error


cdef int raise_driver(DriverDevice driver_device, Outcome* out) except -1:
    return check(driver_device.context.table, out.code, out.call.decode())


def value_of(value):
    """Return a timeline's value from 1 on as an int."""
    return value_in(value, 1, "value")


cdef uint64_t value_in(object value, uint64_t lowest, str name) except? 0:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a timeline's value is an integer, not {value!r}")
    number = index(value)
    if not lowest <= number <= TIMELINE_LARGEST:
        raise NonMonotonicError(f"{name} {number} is not from {lowest} to 2**63 - 1", value=number)
    return number


cdef uint64_t deadline_of(object timeout) except? 0:
    """Return when a timeout of so many seconds ends, in ns of the monotonic clock."""
    if timeout is None:
        return FOREVER
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__"):
        raise TypeError(f"a timeout is a number of seconds or None, not {timeout!r}")
    cdef double seconds = float(timeout)
    if not seconds >= 0:
        raise ValueError(f"timeout {timeout!r} is not a number of seconds from 0 on")
    if seconds > 1e9:
        return FOREVER
    return timeline_now() + <uint64_t>(seconds * 1e9)


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

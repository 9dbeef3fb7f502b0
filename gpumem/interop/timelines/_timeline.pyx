"""What all timelines do: check values and streams, wait, signal, close."""

import os
from operator import index

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t

from gpumem._buffer cimport device_of_stream, Stream, stream_handle
from gpumem._native.driver cimport check, context_is_dead, CUstream, DriverDevice
from gpumem._support.process cimport process
from gpumem.interop.timelines._core cimport (
    core_after_fork, CORE_DESERTED, CORE_DRIVER, core_enqueue_signal, core_enqueue_wait, CORE_LATE,
    CORE_NO_MEMORY, CORE_NOT_ABOVE, CORE_OK, core_pending, CORE_POISONED, CORE_REMOVED, core_retire,
    core_signal, core_signal_by_stream, core_wait, core_wait_begin, core_wait_end, core_wait_go_on,
    core_wait_idle, cores_reap, Outcome, TIMELINE_LARGEST, timeline_look, timeline_now, TIMELINE_OK,
    TIMELINE_REMOVED, timeline_value, TimelineCore,
)

from gpumem._support.releases import on_release
from gpumem.errors import (
    ClosedError, DeviceMismatchError, InUseError, NonMonotonicError, TimelineLostError,
    TimelineTimeout, UnsupportedHandleTypeError,
)


cdef enum:
    # How long a wait goes on before it looks for signals and for dead processes, ns.
    SLICE = 100_000_000
    # How long it looks at the value before it sleeps: to sleep and be woken costs about as much.
    SPIN = 5_000

cdef uint64_t FOREVER = <uint64_t>-1
cdef uint64_t spin_time = SPIN if (os.cpu_count() or 1) > 1 else 0


def _reap():
    with nogil:
        cores_reap()


on_release("timelines", _reap)


@cython.no_gc_clear
cdef class Timeline:
    """A counter that only rises, by which streams, the CPU and other programs wait for each other.

    Made by `HostTimeline.create`, by `HostTimeline.from_fd` and by importing one
    (`Importer.import_semaphore`). A wait for a value is over when the counter is at least that.

    Values are integers from 1 to 2**63 - 1, and each signal's is above every value that this
    process signalled or queued before, or has seen; that is checked before the driver hears of
    it, atomically over threads. Signals take effect in the order in which they were made: one that
    is queued on a stream while an earlier one still waits in another stream comes behind it.

    The methods whose names begin with ``enqueue`` never block the CPU. A wait may be queued before
    its signal, by whoever; a stream whose value nobody signals blocks for ever, and so do
    driver calls that wait for it, such as freeing memory. What was queued to a stream before a
    fork is the parent's.

    Safe to use from many threads. One that is dropped while streams still use it is given back by
    a later call of gpumem.

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

        Of a HostTimeline: by any process. A wait for a higher one is for what nobody has
        promised yet.
        """
        self.enter()
        return core_pending(self.core)

    def value(self):
        """Return the value that has been reached.

        Raises
        ------
        UnsupportedHandleTypeError
            The driver has no call that reads an imported timeline; its exporter has.
        TimelineLostError
            The device that it belongs to was removed.
        """
        self.enter()
        if self.core.page == NULL:
            raise UnsupportedHandleTypeError(
                f"{self!r} has no value to read: the driver of {self.device} has no call for it")
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
        """Wait until a value is reached. The CPU waits; other threads go on.

        Looks for some 5 us, then sleeps. Where the driver alone knows the value, a stream of the
        timeline's own waits, and the CPU asks it; a wait that is given up stays queued there until
        the value is reached, and `close` finds the timeline in use.

        Parameters
        ----------
        value : int
        timeout : float, optional
            Seconds; 0 only looks, None waits for ever.

        Raises
        ------
        TimelineTimeout
            The value was not reached in time.
        TimelineLostError
            It will not be: the timeline was poisoned, its device removed, or a process that uses it
            died and none but this one is left.
        NonMonotonicError
            `value` is out of range.
        ClosedError
        """
        cdef uint64_t number = value_of(value)
        cdef uint64_t deadline = deadline_of(timeout)
        self.enter()
        if self.core.page == NULL:
            self.wait_by_stream(number, deadline, timeout)
        elif timeline_look(self.core.page, number) != TIMELINE_OK:
            self.wait_for_page(number, deadline, timeout)

    cdef int wait_for_page(self, uint64_t value, uint64_t deadline, object timeout) except -1:
        cdef Outcome out
        cdef uint64_t spin = spin_time
        cdef int status = CORE_LATE
        self.inside += 1
        try:
            while True:
                with nogil:
                    status = core_wait(self.core, value, min(deadline, timeline_now() + SLICE),
                                       spin, &out)
                if status != CORE_LATE or timeline_now() >= deadline:
                    break
                spin = 0
                PyErr_CheckSignals()
        finally:
            self.inside -= 1
        return self.report(status, &out, (value, timeout))

    cdef int wait_by_stream(self, uint64_t value, uint64_t deadline, object timeout) except -1:
        cdef Outcome out
        cdef CUstream stream
        cdef int status
        self.inside += 1
        try:
            with nogil:
                status = core_wait_begin(self.core, &self.driver_device.context, &stream, value,
                                         &out)
            self.report(status, &out, value)
            try:
                while True:
                    with nogil:
                        status = core_wait_go_on(&self.driver_device.context, stream,
                                                 min(deadline, timeline_now() + SLICE), &out)
                    if status != CORE_LATE or timeline_now() >= deadline:
                        break
                    PyErr_CheckSignals()
            finally:
                with nogil:
                    core_wait_end(&self.driver_device.context, stream)
        finally:
            self.inside -= 1
        return self.report(status, &out, (value, timeout))

    def signal(self, value):
        """Let the value be reached now.

        While a GPU still has to store a lower value, that comes first and the call waits for it.
        Where the driver alone knows the value, the signal is queued on a stream of the timeline's
        own. A poisoned timeline takes signals, so that streams which wait for it can be let go.

        Parameters
        ----------
        value : int

        Raises
        ------
        NonMonotonicError
            The value is not above all that are known, or out of range.
        ClosedError
        """
        cdef Outcome out
        cdef uint64_t number = value_of(value)
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
                while status == CORE_LATE:      # a device's store is on its way
                    PyErr_CheckSignals()
                    with nogil:
                        status = core_signal(self.core, number, timeline_now() + SLICE, &out)
        finally:
            self.inside -= 1
        self.report(status, &out, number)

    # ---- streams ----

    def enqueue_wait(self, stream, value):
        """Let a stream's work from here on wait, on the device, until a value is reached.

        Costs no driver call if it is seen to be reached already.

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
        cdef Outcome out
        cdef CUstream handle
        cdef int status
        cdef uint64_t number = value_of(value)
        cdef DriverDevice driver_device = self.stream_of(stream, &handle)
        self.enter()            # after others' code, which reading a stream may run
        self.inside += 1
        with nogil:
            cores_reap()
            status = core_enqueue_wait(self.core, &driver_device.context, handle, number, &out)
        self.inside -= 1
        if status == CORE_DRIVER:
            raise_driver(driver_device, &out)
        self.report(status, &out, number)

    def enqueue_signal(self, stream, value):
        """Signal a value on the device, when all that the stream was given so far is done.

        Parameters
        ----------
        stream : Stream, int or object
            As `enqueue_wait` takes it.
        value : int

        Raises
        ------
        NonMonotonicError
            The value is not above all that are known, or out of range.
        DeviceMismatchError, DriverError, TimelineLostError, ClosedError
            As `enqueue_wait` raises them.
        """
        cdef Outcome out
        cdef CUstream handle
        cdef int status
        cdef uint64_t number = value_of(value)
        cdef DriverDevice driver_device = self.stream_of(stream, &handle)
        self.enter()            # after others' code, which reading a stream may run
        self.inside += 1
        with nogil:
            cores_reap()
            status = core_enqueue_signal(self.core, &driver_device.context, handle, number, &out)
        self.inside -= 1
        if status == CORE_DRIVER:
            raise_driver(driver_device, &out)
        self.report(status, &out, number)

    # ---- the end ----

    def export(self):
        """Return an owning `Handle` of it, for another process.

        Raises
        ------
        UnsupportedHandleTypeError
            An imported timeline is exported by whoever made it.
        """
        self.enter()
        raise UnsupportedHandleTypeError(
            f"{self!r} was imported: only the program that made it can export it")

    def close(self, *, timeout=None):
        """Give it back. Idempotent; other processes that have it go on.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for streams that still have a wait or signal of it queued; None: not
            at all.

        Raises
        ------
        InUseError
            Such a stream, or a thread that waits; the timeline is as it was.
        """
        cdef uint64_t deadline = 0 if timeout is None else deadline_of(timeout)
        cdef int status = CORE_OK
        if self.core == NULL:
            return
        if not self.is_parents():
            self.refuse_if_inside()
            status = self.wait_until_idle(deadline)
            self.refuse_if_inside()
        if self.core == NULL:
            return          # another thread was faster
        if status == CORE_LATE:
            raise InUseError(
                f"{self!r} is in use: a stream still has a wait for it or a signal of it queued")
        self.retire()

    cdef void retire(self):
        cdef TimelineCore* core = self.core
        self.core = NULL
        core_retire(core)
        with nogil:
            cores_reap()

    cdef int wait_until_idle(self, uint64_t deadline) except -1:
        cdef int status
        self.inside += 1
        try:
            while True:
                with nogil:
                    status = core_wait_idle(self.core, min(deadline, timeline_now() + SLICE))
                if status == CORE_OK or timeline_now() >= deadline:
                    return status
                PyErr_CheckSignals()
        finally:
            self.inside -= 1

    cdef int refuse_if_inside(self) except -1:
        if self.inside != 0:
            raise InUseError(f"{self!r} is in use: another thread is in a call of it")
        return 0

    def __enter__(self):
        self.enter()
        return self

    def __exit__(self, *exception):
        # Streams that still use it are let finish: whoever leaves a block has nothing to catch.
        if self.core != NULL and (self.inside == 0 or self.is_parents()):
            self.retire()

    def __reduce__(self):
        raise TypeError(f"cannot pickle {self!r}: export() gives a Handle, which can be sent")

    def __repr__(self):
        state = "closed" if self.core == NULL else "open"
        where = "" if self.device is None else f" of {self.device}"
        return f"<gpumem.interop.{type(self).__name__}{where} {state}>"

    # ---- below ----

    cdef bint is_parents(self):
        """Tell whether what it has of drivers, and the threads in its calls, are a parent's."""
        return self.core.generation != process.generation

    cdef int enter(self) except -1:
        """See that it can be used by this process."""
        if self.core == NULL:
            raise ClosedError("this timeline is closed")
        if self.core.generation != process.generation:
            self.after_fork()
        return 0

    cdef int after_fork(self) except -1:
        if self.imported:
            raise ClosedError(f"{self!r} belongs to the parent process")
        core_after_fork(self.core)
        self.inside = 0
        if self.device is not None:
            self.driver_device = self.device._open()
        return 0

    cdef DriverDevice stream_of(self, object stream, CUstream* handle):
        self.enter()
        cdef DriverDevice driver_device = self.driver_device
        if isinstance(stream, Stream):
            if ((<Stream>stream).driver_device is not None
                    and context_is_dead(&(<Stream>stream).driver_device.context)):
                raise ClosedError("this stream belongs to the parent process")
            if driver_device is None:
                driver_device = (<Stream>stream).driver_device
                if driver_device is None:
                    raise ValueError("this stream was not initialised")
            elif (<Stream>stream).driver_device is not driver_device:
                raise DeviceMismatchError(f"{stream!r} is not a stream of {self.device}, which "
                                          "this timeline belongs to")
        elif driver_device is None:
            device = device_of_stream(stream)
            if device is None:
                raise TypeError(f"of which device is the stream {stream!r}? This timeline belongs "
                                "to none: it takes a gpumem.Stream, or another library's object "
                                "that says its device")
            driver_device = device._open()
        stream_handle(stream, driver_device, handle)
        return driver_device

    cdef int report(self, int status, Outcome* out, object value) except -1:
        """Raise what a status means. `value` is the one asked for; of a wait with its timeout."""
        if status == CORE_OK:
            return 0
        if status == CORE_NOT_ABOVE:
            raise NonMonotonicError(
                f"{value} is not above {out.known}, which was signalled or queued before",
                value=value, known=out.known)
        if status == CORE_LATE:
            value, timeout = value
            raise TimelineTimeout(f"{self!r} did not reach {value} in {timeout} s"
                                  + self.progress())
        if status == CORE_POISONED:
            raise TimelineLostError(f"{self!r} was poisoned" + self.progress())
        if status == CORE_REMOVED:
            raise TimelineLostError(f"the device of {self!r} was removed")
        if status == CORE_DESERTED:
            raise TimelineLostError(f"process {out.process} died, and no other process is left to "
                                    f"signal {self!r}" + self.progress())
        if status == CORE_DRIVER:
            return raise_driver(self.driver_device, out)
        if status == CORE_NO_MEMORY:
            raise MemoryError("no memory for a timeline's books")
        raise OSError(out.system, os.strerror(out.system), out.call.decode())

    cdef str progress(self):
        if self.core == NULL or self.core.page == NULL:
            return ""
        return f"; its value is {timeline_value(self.core.page)}"


cdef int raise_driver(DriverDevice driver_device, Outcome* out) except -1:
    return check(driver_device.context.table, out.code, out.call.decode())


cdef uint64_t value_of(object value) except? 0:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a timeline's value is an integer, not {value!r}")
    number = index(value)
    if not 1 <= number <= TIMELINE_LARGEST:
        raise NonMonotonicError(f"value {number} is not from 1 to 2**63 - 1", value=number)
    return number


cdef uint64_t deadline_of(object timeout) except? 0:
    """Return when a timeout of so many seconds ends, ns on the monotonic clock."""
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
    """One value of a timeline: what `Stream.wait` takes, and what says when memory is ready.

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

    cdef readonly Timeline timeline
    cdef readonly object value

    def __init__(self, Timeline timeline not None, value):
        self.timeline = timeline
        self.value = value_of(value)

    def wait(self, timeout=None):
        """Let the CPU wait for it; see `Timeline.wait`."""
        self.timeline.wait(self.value, timeout)

    def enqueue_wait(self, stream):
        """Let a stream wait for it; see `Timeline.enqueue_wait`."""
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

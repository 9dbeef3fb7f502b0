"""HostTimeline: a timeline in shared memory."""

from operator import index

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uint64_t

from gpumem._driver cimport DriverDevice
from gpumem._handle cimport handle_of
from gpumem.interop._page_file cimport (
    page_file_close,
    page_file_dup,
    page_file_is_long,
    page_file_is_sealed,
    page_file_map,
    page_file_new,
    page_file_unmap,
)
from gpumem.interop._timeline cimport Timeline
from gpumem.interop._timeline_core cimport (
    TIMELINE_LARGEST,
    TIMELINE_PAGE_BYTES,
    TimelinePage,
    core_new,
    cores_reap,
    timeline_is_poisoned,
    timeline_page_build,
    timeline_page_is_ours,
    timeline_poison,
)
from gpumem.interop._timeline_queue cimport rehearse_memory_operations

import errno as codes
import os

from gpumem.device import Device
from gpumem.errors import BadHandleError, NonMonotonicError
from gpumem.interop.descriptors import SemaphoreType


@cython.final
cdef class HostTimeline(Timeline):
    """A timeline in a page of memory that other processes, and the streams of any device, share.

    The page is a sealed file in memory. The CPU waits with a futex, without polling as long as no
    GPU signals, and looks every 250 us where one does, because a GPU's store wakes nobody. Streams
    of a GPU wait for the page and store to it by stream memory operations; it is registered with
    the driver at a device's first use. Streams of the host device take part as the CPU does.

    Sent through `multiprocessing`, it arrives as the same timeline. It goes on in a forked child.

    A wait of the CPU notices, within about 0.1 s, that a process which uses the timeline ended
    without closing it and that none but the waiting one is left. It cannot tell of processes in
    another PID namespace, nor beyond the first 112, nor of one that hangs; those count as alive.
    A process uses the timeline from its first call on.

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
            The only one whose streams may use it; needed for streams that are handles or another
            library's. None: streams of any device, as `Stream` objects.

        Raises
        ------
        NonMonotonicError
            `initial` is out of range.
        ValueError
            Unknown device.
        OSError
            The system gave no memory or no descriptor.
        """
        cdef uint64_t first = initial_of(initial)
        cdef DriverDevice place = open_device(device)
        cdef int fd = page_file_new()
        if fd < 0:
            raise OSError(errno, os.strerror(errno))
        return join(fd, device, place, &first)

    @staticmethod
    def from_fd(fd, device=None):
        """Take part in a timeline of another process, or of this one.

        Parameters
        ----------
        fd : int, Handle or object with ``fileno()``
            As `export` gave it; it stays the caller's.
        device : Device or str, optional
            As in `create`.

        Raises
        ------
        BadHandleError
            It is not a descriptor of a timeline's page, or the file could still be shortened.
        TypeError, ValueError
            `fd` is not an integer, or negative; unknown device.
        """
        cdef DriverDevice place = open_device(device)
        cdef int number = number_of(fd)
        cdef int own = page_file_dup(number)
        if own < 0:
            raise BadHandleError(errno, f"descriptor {number}: {os.strerror(errno)}")
        if not page_file_is_long(own) or not page_file_is_sealed(own):
            page_file_close(own)
            raise BadHandleError(codes.EINVAL, f"descriptor {number} is not a timeline: not a "
                                               f"sealed file of {TIMELINE_PAGE_BYTES} bytes")
        return join(own, device, place, NULL)

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
            The system gave no descriptor.
        """
        self.enter()
        fd = page_file_dup(self.core.fd)
        if fd < 0:
            raise OSError(errno, os.strerror(errno))
        return handle_of(fd, SemaphoreType.HOST_TIMELINE, None)

    @property
    def poisoned(self):
        """Whether it was declared lost."""
        self.enter()
        return timeline_is_poisoned(self.core.page)

    def poison(self):
        """Let every wait of the CPU for what is not reached yet fail with TimelineLostError.

        For a program that cannot signal what it has promised. For good, and in every process.
        Streams cannot be told: they go on waiting until a value is signalled.
        """
        self.enter()
        timeline_poison(self.core.page)

    def __reduce__(self):
        from multiprocessing.reduction import DupFd

        self.enter()        # a process that is being started inherits this very descriptor
        return _arrived, (DupFd(self.core.fd), self.device)


def _arrived(duplicate, device):
    with handle_of(duplicate.detach(), SemaphoreType.HOST_TIMELINE, None) as handle:
        return HostTimeline.from_fd(handle, device)


def _rehearse_memory_operations(bint on):
    """Let host streams that use a timeline for the first time do it as a GPU's do."""
    rehearse_memory_operations(on)


cdef HostTimeline join(int fd, object device, DriverDevice place, uint64_t* first):
    """Make the object; the descriptor is its own, and closed if that fails. A new page begins with
    the value `first`."""
    cdef HostTimeline timeline = HostTimeline.__new__(HostTimeline)
    cdef TimelinePage* page = page_file_map(fd)
    cdef int error = errno
    cores_reap()
    if page == NULL:
        page_file_close(fd)
        raise BadHandleError(error, f"the timeline cannot be mapped: {os.strerror(error)}")
    if first != NULL:
        timeline_page_build(page, first[0])
    if not timeline_page_is_ours(page):
        page_file_unmap(page)
        page_file_close(fd)
        raise BadHandleError(codes.EINVAL, "the descriptor is not a timeline: its page has no mark")
    timeline.core = core_new(page, fd)
    if timeline.core == NULL:
        page_file_unmap(page)
        page_file_close(fd)
        raise MemoryError("no memory for a timeline's books")
    timeline.device = None if device is None else Device(device)
    timeline.place = place
    return timeline


cdef DriverDevice open_device(object device):
    return None if device is None else Device(device)._open()


cdef uint64_t initial_of(object value) except? 0:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a timeline's value is an integer, not {value!r}")
    number = index(value)
    if not 0 <= number <= TIMELINE_LARGEST:
        raise NonMonotonicError(f"initial value {number} is not from 0 to 2**63 - 1", value=number)
    return number


cdef int number_of(object fd) except -1:
    number = fd.fileno() if hasattr(fd, "fileno") else fd
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"a descriptor is an integer or has fileno(), not {fd!r}")
    number = index(number)
    if not 0 <= number < 1 << 31:
        raise BadHandleError(codes.EBADF, f"descriptor {number} is not from 0 to 2**31 - 1")
    return number

"""HostTimeline: a timeline in shared memory."""

import errno as codes
import os
from operator import index

cimport cython
from libc cimport errno as c_errno
from libc.errno cimport errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset

from gpumem._native.driver cimport (
    check, context_enter, context_leave, CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, CUDA_SUCCESS, CUexternalSemaphoreHandleType, CUresult,
    DriverDevice, require,
)
from gpumem._resource cimport handle_of
from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, mmap, munmap, PROT_READ, PROT_WRITE
from gpumem.interop.timelines._core cimport (
    core_add_semaphore, core_list, core_new, CORE_OK, cores_reap, rehearse_memory_operations,
    timeline_is_poisoned, TIMELINE_LARGEST, timeline_page_build, TIMELINE_PAGE_BYTES,
    timeline_page_is_ours, timeline_poison, TimelinePage,
)
from gpumem.interop.timelines._timeline cimport Timeline

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
        cdef DriverDevice driver_device = open_device(device)
        cdef int fd = page_file_new()
        if fd < 0:
            raise OSError(errno, os.strerror(errno))
        return join(fd, device, driver_device, &first)

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
        cdef DriverDevice driver_device = open_device(device)
        cdef int number = number_of(fd)
        cdef int own = page_file_dup(number)
        if own < 0:
            raise BadHandleError(errno, f"descriptor {number}: {os.strerror(errno)}")
        if not page_file_is_long(own) or not page_file_is_sealed(own):
            page_file_close(own)
            raise BadHandleError(codes.EINVAL, f"descriptor {number} is not a timeline: not a "
                                               f"sealed file of {TIMELINE_PAGE_BYTES} bytes")
        return join(own, device, driver_device, NULL)

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


cdef HostTimeline join(int fd, object device, DriverDevice driver_device, uint64_t* first):
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
    timeline.driver_device = driver_device
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


# ---- Timelines that others made, imported through a device's driver ------------------------------


@cython.final
cdef class DriverTimeline(Timeline):
    """A timeline that another API made: Vulkan, Direct3D 12, another process's driver.

    Belongs to the device that imported it. The CUDA driver has no call that reads the value, so
    `value` is refused there, while `wait` and `signal` go through a stream of the timeline's own;
    on the host device, whose timelines are pages of memory, the CPU does all of it itself.
    Dead after fork.

    Examples
    --------
    >>> from gpumem.interop import HostTimeline, SemaphoreDescriptor, SemaphoreType, Importer
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
        fd = page_file_dup(self.core.fd)
        if fd < 0:
            raise OSError(errno, os.strerror(errno))
        return handle_of(fd, SemaphoreType.TIMELINE_OPAQUE_FD, None)


def import_fd(device, int fd):
    """Import a Vulkan timeline semaphore by its descriptor, which stays the caller's.

    The driver is given a duplicate, which is its own when it succeeds, and closed here if not.
    """
    cdef DriverDevice driver_device = device._open()
    cdef CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc
    cdef DriverTimeline timeline
    cdef int given = duplicate(fd)
    try:
        timeline = prepare(device, driver_device, fd)
        memset(&desc, 0, sizeof(desc))
        desc.type = CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
        desc.handle.fd = given
        complete(timeline, driver_device, &desc)
    except BaseException:
        page_file_close(given)
        raise
    return timeline


def import_windows(device, int kind, handle):
    """Import by an NT handle or a name; both stay the caller's, the driver keeps its own reference.

    `kind` is the driver's number of the type, `handle` an integer or a text.
    """
    cdef DriverDevice driver_device = device._open()
    cdef CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc
    cdef DriverTimeline timeline = prepare(device, driver_device, -1)
    memset(&desc, 0, sizeof(desc))
    desc.type = <CUexternalSemaphoreHandleType>kind
    if isinstance(handle, str):
        name = (handle + "\0").encode("utf-16-le")
        desc.handle.win32.name = <const char*>name
    else:
        desc.handle.win32.handle = <void*><uintptr_t>handle
    complete(timeline, driver_device, &desc)
    return timeline


cdef int duplicate(int fd) except -1:
    cdef int own = page_file_dup(fd)
    if own < 0:
        raise BadHandleError(errno, f"descriptor {fd}: {os.strerror(errno)}")
    return own


cdef DriverTimeline prepare(object device, DriverDevice driver_device, int fd):
    """Make all but the import, so that nothing has to be undone after it."""
    cdef DriverTimeline timeline = DriverTimeline.__new__(DriverTimeline)
    cdef TimelinePage* page = NULL
    cdef int own = -1
    require(driver_device.context.table.cuImportExternalSemaphore, "cuImportExternalSemaphore",
            "a timeline of another API")
    cores_reap()
    timeline.device = device
    timeline.driver_device = driver_device
    timeline.imported = True
    if fd >= 0 and driver_device.context.is_host and page_file_is_long(fd):
        own = duplicate(fd)
        page = page_file_map(own)
        if page == NULL:
            page_file_close(own)
            own = -1
    timeline.core = core_new(page, own)
    if timeline.core == NULL:
        if page != NULL:
            page_file_unmap(page)
            page_file_close(own)
        raise MemoryError("no memory for a timeline's books")
    core_list(timeline.core)
    if core_add_semaphore(timeline.core, &driver_device.context, NULL) != CORE_OK:
        timeline.retire()
        raise MemoryError("no memory for a timeline's books")
    return timeline


cdef int complete(DriverTimeline timeline, DriverDevice driver_device,
                  const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC* desc) except -1:
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


cdef extern from "<sys/mman.h>" nogil:
    enum:
        MFD_CLOEXEC
        MFD_ALLOW_SEALING
    int memfd_create(const char* name, unsigned int flags)

cdef extern from "<fcntl.h>" nogil:
    enum:
        F_DUPFD_CLOEXEC
        F_ADD_SEALS
        F_GET_SEALS
        F_SEAL_GROW
        F_SEAL_SEAL
        F_SEAL_SHRINK
    int fcntl(int fd, int command, ...)

cdef extern from "<sys/stat.h>" nogil:
    struct stat_t "stat":
        long st_size
    int fstat(int fd, stat_t* status)

cdef extern from "<unistd.h>" nogil:
    int ftruncate(int fd, long size)
    int c_close "close"(int fd)


cdef int page_file_new() noexcept nogil:
    cdef int fd = memfd_create(b"gpumem timeline", MFD_CLOEXEC | MFD_ALLOW_SEALING)
    cdef int error
    if fd < 0:
        return -1
    if (ftruncate(fd, TIMELINE_PAGE_BYTES) == 0
            and fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0):
        return fd
    error = c_errno.errno
    c_close(fd)
    c_errno.errno = error
    return -1


cdef int page_file_dup(int fd) noexcept nogil:
    return fcntl(fd, F_DUPFD_CLOEXEC, 3)


cdef TimelinePage* page_file_map(int fd) noexcept nogil:
    cdef void* page = mmap(NULL, TIMELINE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    return NULL if page == MAP_FAILED else <TimelinePage*>page


cdef void page_file_unmap(TimelinePage* page) noexcept nogil:
    munmap(page, TIMELINE_PAGE_BYTES)


cdef bint page_file_is_long(int fd) noexcept nogil:
    cdef stat_t status
    return fstat(fd, &status) == 0 and status.st_size >= TIMELINE_PAGE_BYTES


cdef bint page_file_is_sealed(int fd) noexcept nogil:
    cdef int seals = fcntl(fd, F_GET_SEALS)
    return seals >= 0 and seals & F_SEAL_SHRINK != 0


cdef void page_file_close(int fd) noexcept nogil:
    c_close(fd)

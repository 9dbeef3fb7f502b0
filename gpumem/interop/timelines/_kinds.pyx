"""HostTimeline, a timeline in shared memory, and DriverTimeline, one that another API made."""

import errno as codes
import fcntl
import os
from operator import index

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset

from gpumem._native.driver cimport (
    check, context_enter, context_leave, CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, CUDA_SUCCESS, CUresult,
    DriverDevice, require,
)
from gpumem._resource cimport Handle, handle_of
from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, mmap, munmap, PROT_READ, PROT_WRITE
from gpumem.interop.timelines._core cimport (
    core_list, core_make_link, core_new, rehearse_memory_operations, release_retired_cores,
    timeline_is_poisoned, timeline_own_file, timeline_page_build, TIMELINE_PAGE_BYTES,
    timeline_page_is_ours, timeline_poison, TimelinePage,
)
from gpumem.interop.timelines._timeline cimport Timeline, value_in

from gpumem._resource.handle import received_handle
from gpumem.device import Device
from gpumem.errors import BadHandleError, DeviceMismatchError
from gpumem.interop.descriptors import duplicate, SemaphoreType


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
    Processes beyond the first 112, those without a /proc, and those that hang count as alive. A
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
            The only one whose streams may use it; needed for streams that are handles or another
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
            What `export` returned; the caller keeps it.
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
        """Let every wait of the CPU for what is not reached yet fail with TimelineLostError.

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
    raises there, while `wait` and `signal` go through a stream of the timeline's own; on the host
    device, whose timelines are pages of memory, the CPU does all of it itself. Closed after a fork.

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

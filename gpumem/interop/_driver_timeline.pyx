"""Timelines that others made, imported through a device's driver."""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from gpumem._driver cimport (
    CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
    CUDA_SUCCESS,
    CUexternalSemaphoreHandleType,
    CUresult,
    DriverDevice,
    check,
    place_enter,
    place_leave,
    require,
)
from gpumem._handle cimport handle_of
from gpumem.interop._page_file cimport (
    page_file_close,
    page_file_dup,
    page_file_is_long,
    page_file_map,
    page_file_unmap,
)
from gpumem.interop._timeline cimport Timeline
from gpumem.interop._timeline_core cimport (
    CORE_OK,
    TimelinePage,
    core_add_semaphore,
    core_list,
    core_new,
    cores_reap,
)

import os

from gpumem.errors import BadHandleError
from gpumem.interop.descriptors import SemaphoreType


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
    cdef DriverDevice place = device._open()
    cdef CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc
    cdef DriverTimeline timeline
    cdef int given = duplicate(fd)
    try:
        timeline = prepare(device, place, fd)
        memset(&desc, 0, sizeof(desc))
        desc.type = CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
        desc.handle.fd = given
        complete(timeline, place, &desc)
    except BaseException:
        page_file_close(given)
        raise
    return timeline


def import_windows(device, int kind, handle):
    """Import by an NT handle or a name; both stay the caller's, the driver keeps its own reference.

    `kind` is the driver's number of the type, `handle` an integer or a text.
    """
    cdef DriverDevice place = device._open()
    cdef CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc
    cdef DriverTimeline timeline = prepare(device, place, -1)
    memset(&desc, 0, sizeof(desc))
    desc.type = <CUexternalSemaphoreHandleType>kind
    if isinstance(handle, str):
        name = (handle + "\0").encode("utf-16-le")
        desc.handle.win32.name = <const char*>name
    else:
        desc.handle.win32.handle = <void*><uintptr_t>handle
    complete(timeline, place, &desc)
    return timeline


cdef int duplicate(int fd) except -1:
    cdef int own = page_file_dup(fd)
    if own < 0:
        raise BadHandleError(errno, f"descriptor {fd}: {os.strerror(errno)}")
    return own


cdef DriverTimeline prepare(object device, DriverDevice place, int fd):
    """Make all but the import, so that nothing has to be undone after it."""
    cdef DriverTimeline timeline = DriverTimeline.__new__(DriverTimeline)
    cdef TimelinePage* page = NULL
    cdef int own = -1
    require(place.place.table.cuImportExternalSemaphore, "cuImportExternalSemaphore",
            "a timeline of another API")
    cores_reap()
    timeline.device = device
    timeline.place = place
    timeline.imported = True
    if fd >= 0 and place.place.is_host and page_file_is_long(fd):
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
    if core_add_semaphore(timeline.core, &place.place, NULL) != CORE_OK:
        timeline.retire()
        raise MemoryError("no memory for a timeline's books")
    return timeline


cdef int complete(DriverTimeline timeline, DriverDevice place,
                  const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC* desc) except -1:
    cdef CUresult code
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            code = place.place.table.cuImportExternalSemaphore(
                &timeline.core.links.semaphore, desc)
            place_leave(&place.place)
    if code != CUDA_SUCCESS:
        timeline.retire()
    return check(place.place.table, code, "cuImportExternalSemaphore")

"""Descriptors of memory or timelines in other processes, and pages of blocks that have them.

A descriptor's number lies in one C field and is closed by the C library, so that a finalizer at the
interpreter's end closes it as well, when modules have ended already.

A block that other libraries' hooks allocated lies among others in the pages of an arena. A process
exports these pages whole, so a process that opens one block reaches its neighbours, too: for
processes of one program, as with the driver's legacy IPC. The pages of a live block never move.
A region of a graph pool is one physical handle, and is exported as one page.
"""

from enum import Enum
from errno import EBADF, EINVAL
from operator import index
from os import fstat

cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from posix.fcntl cimport F_SETFD, fcntl, FD_CLOEXEC
from posix.unistd cimport close

from gpumem._native.arena.api cimport (
    ARENA_ASLEEP, arena_context, arena_driver_calls, arena_drop, ARENA_NO_METADATA, ARENA_OK,
    arena_page_around, arena_serial, ArenaCore, hook_arena, hook_share,
)
from gpumem._native.backing cimport memory_export
from gpumem._native.driver cimport (
    Access, access_apply, access_init, check, context_enter, context_is_dead, context_leave,
    context_relax, context_restore, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_SUCCESS,
    CUdeviceptr, CUmemGenericAllocationHandle, CUresult, CUstreamCaptureMode, device_enter,
    device_leave, DeviceContext, DriverDevice,
)
from gpumem._native.pages cimport MappedPage, pages_make_exportable
from gpumem._support.process cimport process_is_exiting

from gpumem._support.signatures import ClassSignature
from gpumem._support.sizes import exact_size
from gpumem.errors import AsleepError, BadHandleError, ClosedError, UnsupportedHandleTypeError


@cython.final
cdef class Handle:
    """Owns a file descriptor and closes it; programs that this process starts do not inherit it.

    The memory or timeline stays alive as long as the descriptor is open in some process. Sent
    through `multiprocessing` (a pipe, a queue, a process's arguments), it arrives as a descriptor
    of the receiving process, with its `kind` and `contents`. Over a socket of your own, send
    ``fileno()`` with `socket.send_fds` and make a Handle of what arrives.

    Parameters
    ----------
    fd : int
        An open descriptor; from here on this object's.
    kind : MemoryHandleType or SemaphoreType, optional
        How importers have to open it.
    contents : object, optional
        Describes what it refers to, for its receiver; picklable.

    Raises
    ------
    TypeError, ValueError
        `fd` is not an integer, or negative.
    OSError
        `fd` is not open.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.DriverPool("host", {"shareable": True}) as pool:
    ...     with pool.export_handle() as handle:
    ...         handle.fileno() > 0
    True
    """

    __signature__ = ClassSignature()

    def __cinit__(self):
        self.fd = -1

    def __init__(self, fd, *, kind=None, contents=None):
        """Take the arguments that the class describes."""
        descriptor_of(fd)
        # A second call would lose the first descriptor.
        if self.fd >= 0:
            raise TypeError("Handle.__init__ called twice")
        # A closed number is refused: closing it later could close a descriptor of another owner.
        fstat(fd)
        self.kind = kind
        self.contents = contents
        own(self, fd)

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)

    def fileno(self):
        """Return the descriptor, which stays this object's.

        Raises
        ------
        ClosedError
            It was closed or detached.
        """
        if self.fd < 0:
            raise ClosedError("this handle is closed")
        return self.fd

    def detach(self):
        """Return the descriptor, which the caller closes; this object is closed."""
        fd = self.fileno()
        self.fd = -1
        return fd

    @property
    def closed(self):
        """Whether it was closed or detached."""
        return self.fd < 0

    def close(self):
        """Close the descriptor. Idempotent."""
        cdef int fd = self.fd
        # It is marked as closed first: closing twice would close another thread's new descriptor.
        self.fd = -1
        if fd >= 0:
            close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    @staticmethod
    def _owning(int fd, kind=None, contents=None):
        """Make a Handle of a descriptor, which is closed if that fails."""
        return handle_of(fd, kind, contents)

    def _describe(self, kind, contents):
        """Set how importers open it, and what it refers to."""
        self.kind = kind
        self.contents = contents

    def __reduce__(self):
        from multiprocessing.reduction import DupFd

        # DupFd duplicates the descriptor into the receiving process, also under "spawn".
        return received_handle, (DupFd(self.fileno()), self.kind, self.contents)

    def __repr__(self):
        # A kind from a pickle may be any object, and its text may raise.
        what = ""
        if self.kind is not None:
            what = f" {self.kind.name if isinstance(self.kind, Enum) else 'of an unknown kind'}"
        return f"<gpumem.Handle{what} {'closed' if self.fd < 0 else self.fd}>"


cdef int descriptor_of(object fd) except -1:
    if isinstance(fd, bool) or not isinstance(fd, int):
        raise TypeError(f"a descriptor must be an integer, not {type(fd).__name__}")
    if not 0 <= fd < 1 << 31:
        raise ValueError(f"descriptor {fd} is out of range: expected 0 to 2**31 - 1")
    return fd


def received_handle(sent, kind, contents):
    """Make a Handle of the DupFd of a pickle, which may have been tampered with.

    Raises
    ------
    BadHandleError
        No descriptor came: its sender is gone, or the pickle is damaged.
    """
    cdef int fd
    try:
        fd = index(sent.detach())
        fstat(fd)
    except Exception as error:
        raise BadHandleError(EBADF, f"no descriptor arrived: {error!r}") from error
    return handle_of(fd, kind, contents)


cdef Handle handle_of(int fd, object kind, object contents):
    # The descriptor is closed if that fails.
    cdef Handle handle
    try:
        handle = Handle.__new__(Handle)
    except MemoryError:
        close(fd)
        raise
    handle.kind = kind
    handle.contents = contents
    own(handle, fd)
    return handle


cdef void own(Handle handle, int fd) noexcept:
    # Sockets and drivers return descriptors that a child program would inherit, and keep open.
    fcntl(fd, F_SETFD, FD_CLOEXEC)
    handle.fd = fd


# ---- pages of blocks in other processes ----------------------------------------------------------

def make_exportable():
    """Let pages that are made from now on be exported, in the whole process."""
    pages_make_exportable()


def pages_of(uint64_t address):
    """Return (device, is it a host device, bytes before the block in its first page, pages).

    The device by its ordinal, each page by its address and bytes.

    Parameters
    ----------
    address : int
        Where a live block begins that a library's hooks allocated.

    Raises
    ------
    UnsupportedHandleTypeError
        No such block begins there, or its memory is not pages.
    """
    cdef uint64_t nbytes = 0
    cdef uint64_t at = address
    cdef uint64_t before = 0
    cdef MappedPage page
    cdef ArenaCore* arena = hook_arena(address, &nbytes)
    cdef list pages = []
    if arena == NULL:
        raise no_block(address)
    try:
        while at < address + nbytes:
            if not arena_page_around(arena, at, &page):
                raise not_pages(address)
            if not pages:
                before = address - page.begin
            pages.append((page.begin, page.nbytes))
            at = page.begin + page.nbytes
        return arena_context(arena).device, bool(arena_context(arena).is_host), before, pages
    finally:
        arena_drop(arena)


def mapping_of(uint64_t address):
    """Return a text of the mappings in the arena of the block at an address.

    While it is the same, the pages at the same addresses are the same memory: it names the arena,
    and how many calls of the driver it has made for its memory. Read it before the pages.

    Raises
    ------
    UnsupportedHandleTypeError
        No such block begins there.
    """
    cdef uint64_t nbytes = 0
    cdef ArenaCore* arena = hook_arena(address, &nbytes)
    if arena == NULL:
        raise no_block(address)
    try:
        return f"{arena_serial(arena):x}.{arena_driver_calls(arena):x}"
    finally:
        arena_drop(arena)


def keep_awake(uint64_t address):
    """Count the block at an address as one that other processes have, until it is freed.

    `Arena.sleep` then refuses, or leaves its tag awake: their views would stay, and their writes
    would be lost.

    Raises
    ------
    UnsupportedHandleTypeError
        As `pages_of`.
    AsleepError
        The block is asleep.
    MemoryError
        Out of host memory.
    """
    cdef int status = hook_share(address)
    if status == ARENA_NO_METADATA:
        raise MemoryError("out of host memory while noting that other processes have a block")
    if status == ARENA_ASLEEP:
        raise AsleepError(f"the block at {address:#x} is asleep, or another thread is putting it "
                          "to sleep: wake() of its arena restores its memory")
    if status != ARENA_OK:
        raise no_block(address)


def export_page(uint64_t address, uint64_t at):
    """Return a Handle of the page that lies at an address inside the block at `address`.

    Raises
    ------
    UnsupportedHandleTypeError
        As `pages_of`; or the page was made before pages were exportable.
    DriverError
        The driver refused.
    """
    cdef uint64_t nbytes = 0
    cdef int fd = -1
    cdef MappedPage page
    cdef CUresult code = CUDA_SUCCESS
    cdef ArenaCore* arena = hook_arena(address, &nbytes)
    cdef bint found
    if arena == NULL:
        raise no_block(address)
    try:
        with nogil:
            found = arena_page_around(arena, at, &page)
            if found:
                code = memory_export(arena_context(arena), page.memory, &fd)
        if not found:
            raise not_pages(address)
        check(arena_context(arena).table, code, "cuMemExportToShareableHandle")
    finally:
        arena_drop(arena)
    return handle_of(fd, None, None)


cdef object no_block(uint64_t address):
    return UnsupportedHandleTypeError(
        f"no block that a library has allocated is at {address:#x}")


cdef object not_pages(uint64_t address):
    return UnsupportedHandleTypeError(
        f"the memory of the block at {address:#x} cannot be exported: expected a block of an arena "
        "with backing = 'virtual' that is awake, or of a graph pool beside one")


@cython.final
@cython.no_gc
cdef class OpenedPages:
    """Another process's pages in this one, in a row; unmapped with the object.

    Parameters
    ----------
    device : Device
    nbytes : int
        Of all pages together.

    Raises
    ------
    DriverError
        The driver refused.
    """

    cdef DriverDevice device        # a reference
    cdef DeviceContext* context
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes
    cdef readonly uint64_t mapped   # bytes, from the beginning on

    def __init__(self, device, uint64_t nbytes):
        """Reserve addresses for them."""
        cdef CUdeviceptr base = 0
        cdef CUresult code
        if self.address:
            raise TypeError("OpenedPages.__init__ called twice")
        self.device = device._open()
        self.context = &self.device.context
        device_enter(self.context, "cuMemAddressReserve")
        with nogil:
            code = self.context.table.cuMemAddressReserve(&base, nbytes, 0, 0, 0)
        device_leave(self.context, code, "cuMemAddressReserve")
        self.address = base
        self.nbytes = nbytes

    def map(self, int fd, uint64_t nbytes):
        """Map the next page after those that are mapped; the descriptor stays the caller's.

        Raises
        ------
        BadHandleError
            The pages are longer than `nbytes` of the object.
        DriverError
            The driver refused.
        """
        cdef const char* call = ""
        cdef CUresult code
        if nbytes == 0 or nbytes > self.nbytes - self.mapped:
            raise BadHandleError(
                EINVAL,
                f"{exact_size(nbytes)} of pages do not fit: {exact_size(self.mapped)} of "
                f"{exact_size(self.nbytes)} are mapped already")
        with nogil:
            code = map_page(self.context, fd, self.address + self.mapped, nbytes, &call)
        check(self.context.table, code, call.decode())
        self.mapped += nbytes

    def give_access(self):
        """Let the device access all mapped pages, by one call of the driver.

        Raises
        ------
        DriverError
            The driver refused.
        """
        cdef Access access
        cdef CUstreamCaptureMode before
        cdef CUresult code
        if self.mapped == 0:
            return
        device_enter(self.context, "cuMemSetAccess")
        with nogil:
            before = context_relax(self.context)
            access_init(&access, self.context, -1)
            code = access_apply(self.context, &access, self.address, self.mapped)
            context_restore(self.context, before)
        device_leave(self.context, code, "cuMemSetAccess")

    def __dealloc__(self):
        if self.address and not process_is_exiting() and not context_is_dead(self.context):
            unmap(self)


cdef CUresult map_page(DeviceContext* context, int fd, uint64_t address, uint64_t nbytes,
                       const char** call) noexcept nogil:
    # The mapping keeps the memory, so the handle is released at once.
    cdef CUmemGenericAllocationHandle memory = 0
    cdef CUstreamCaptureMode before
    cdef CUresult code = context_enter(context)
    call[0] = "cuCtxPushCurrent"
    if code != CUDA_SUCCESS:
        return code
    before = context_relax(context)
    call[0] = "cuMemImportFromShareableHandle"
    code = context.table.cuMemImportFromShareableHandle(
        &memory, <void*><uintptr_t>fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    if code == CUDA_SUCCESS:
        call[0] = "cuMemMap"
        code = context.table.cuMemMap(address, nbytes, 0, memory, 0)
        context.table.cuMemRelease(memory)
    context_restore(context, before)
    context_leave(context)
    return code


cdef void unmap(OpenedPages pages) noexcept:
    # Work that uses them may be queued: an unmap does not wait for it.
    cdef DeviceContext* context = pages.context
    cdef CUstreamCaptureMode before
    with nogil:
        if context_enter(context) == CUDA_SUCCESS:
            before = context_relax(context)
            context.table.cuCtxSynchronize()
            if pages.mapped:
                context.table.cuMemUnmap(pages.address, pages.mapped)
            context.table.cuMemAddressFree(pages.address, pages.nbytes)
            context_restore(context, before)
            context_leave(context)

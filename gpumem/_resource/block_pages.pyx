"""Blocks of pages in other processes: each page's descriptor there, all of them mapped in a row.

A block that other libraries' hooks allocated lies among others in the pages of an arena. What is
exported are these pages whole, so that a process which opens one block reaches its neighbours, too:
for processes of one program, as with the driver's legacy IPC. The pages of a live block never move.
A region of a graph pool is one physical handle, and is exported as one page.
"""

from errno import EINVAL

cimport cython
from libc.stdint cimport uint64_t, uintptr_t

from gpumem._native.arena.api cimport (
    arena_context, arena_driver_calls, arena_drop, ARENA_NO_METADATA, ARENA_OK, arena_page_around,
    arena_serial, ArenaCore, hook_arena, hook_share,
)
from gpumem._native.driver cimport (
    Access, access_apply, access_init, check, context_enter, context_is_dead, context_leave,
    context_relax, context_restore, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_SUCCESS,
    CUdeviceptr, CUmemGenericAllocationHandle, CUresult, CUstreamCaptureMode, DeviceContext,
    DriverDevice,
)
from gpumem._native.pages cimport MappedPage, pages_make_exportable
from gpumem._resource.handle cimport handle_of
from gpumem._support.process cimport process_is_exiting

from gpumem._support.sizes import exact_size
from gpumem.errors import BadHandleError, UnsupportedHandleTypeError


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
    """Return a text of what is mapped in the arena of the block at an address.

    While it is the same, the pages at the same addresses are the same memory: it names the arena,
    and how many calls of the driver it has made for its memory. To be read before the pages.

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

    `Arena.sleep` then refuses, or leaves its tag awake: their views would stay, and what they write
    would be lost.

    Raises
    ------
    UnsupportedHandleTypeError
        As `pages_of`.
    MemoryError
        Out of host memory.
    """
    cdef int status = hook_share(address)
    if status == ARENA_NO_METADATA:
        raise MemoryError("out of host memory while noting that other processes have a block")
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
                code = context_enter(arena_context(arena))
                if code == CUDA_SUCCESS:
                    code = arena_context(arena).table.cuMemExportToShareableHandle(
                        &fd, page.memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
                    context_leave(arena_context(arena))
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
        with nogil:
            code = context_enter(self.context)
            if code == CUDA_SUCCESS:
                code = self.context.table.cuMemAddressReserve(&base, nbytes, 0, 0, 0)
                context_leave(self.context)
        check(self.context.table, code, "cuMemAddressReserve")
        self.address = base
        self.nbytes = nbytes

    def map(self, int fd, uint64_t nbytes):
        """Map the next page behind those that are mapped; the descriptor stays the caller's.

        Raises
        ------
        BadHandleError
            The pages are longer than was said.
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
        """Let the device use all that is mapped, by one call of the driver.

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
        with nogil:
            code = context_enter(self.context)
            if code == CUDA_SUCCESS:
                before = context_relax(self.context)
                access_init(&access, self.context, -1)
                code = access_apply(self.context, &access, self.address, self.mapped)
                context_restore(self.context, before)
                context_leave(self.context)
        check(self.context.table, code, "cuMemSetAccess")

    def __dealloc__(self):
        if self.address and not process_is_exiting() and not context_is_dead(self.context):
            end(self)


cdef CUresult map_page(DeviceContext* context, int fd, uint64_t address, uint64_t nbytes,
                       const char** call) noexcept nogil:
    # The mapping keeps the memory, so that the handle goes at once.
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


cdef void end(OpenedPages pages) noexcept:
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

"""The driver's side of exports: a descriptor of the memory that a block lies in."""

import fcntl
import os

from libc.stdint cimport uint64_t

from gpumem._arena cimport Arena
from gpumem._buffer cimport Buffer, buffer_share, drop_share
from gpumem._native.arena.api cimport APART_SHAREABLE, arena_apart, arena_find_apart, ArenaCore
from gpumem._native.backing cimport Mapped, shared_export
from gpumem._native.driver cimport check, CUresult
from gpumem._resource cimport Handle, handle_of
from gpumem._support.lease cimport Lease

from gpumem._resource.pool import DriverPool
from gpumem.errors import UnsupportedHandleTypeError
from gpumem.interop.descriptors import MemoryHandleType


def export_block(Buffer buffer not None, bint read_only):
    """Return (handle, bytes of the memory, where the block begins in it) of a shareable block.

    Raises
    ------
    UnsupportedHandleTypeError
        The block is not shareable, or its memory cannot be exported to be read only.
    ClosedError
        The buffer is closed.
    DriverError
        The driver refused.
    """
    cdef Lease* share = buffer_share(buffer)    # others may close it meanwhile
    cdef Arena arena
    cdef Mapped memory
    cdef CUresult code
    cdef int fd = -1
    try:
        if not isinstance(buffer.home, Arena):
            raise not_shareable(buffer)
        arena = <Arena>buffer.home
        # A source's regions are not shareable, and it may ask while its arena waits for it.
        if arena.source is not None or not find_memory(arena.core, buffer.address, &memory):
            raise not_shareable(buffer)
        offset = buffer.address - memory.address
        if arena_apart(arena.core, APART_SHAREABLE).has_files:
            return open_file(<int>memory.memory, read_only), memory.nbytes, offset
        if read_only:
            raise UnsupportedHandleTypeError(
                f"memory of {arena.memory} cannot be exported to be read only: the receiver of the "
                "handle may map it to write")
        with nogil:
            code = shared_export(arena_apart(arena.core, APART_SHAREABLE), memory.memory, &fd)
        check(arena.driver_device.context.table, code, "cuMemExportToShareableHandle")
        return handle_of(fd, MemoryHandleType.CUDA_VMM_FD, None), memory.nbytes, offset
    finally:
        drop_share(share)


cdef object open_file(int fd, bint read_only):
    # Return a descriptor of a file in memory; a read-only one cannot be mapped to write.
    if read_only:
        return Handle(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC),
                      kind=MemoryHandleType.MEMFD)
    return Handle(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), kind=MemoryHandleType.MEMFD)


def pool_of(Buffer buffer not None):
    """Return the driver's pool that a buffer's memory is of, behind adaptors, too; else None."""
    return buffer.home if isinstance(buffer.home, DriverPool) else None


cdef object not_shareable(Buffer buffer):
    return UnsupportedHandleTypeError(
        f"{buffer!r} lies among other blocks, so it cannot be exported: allocate it with "
        "arena.allocate(nbytes, shareable=True), or from a DriverPool with shareable=True")


cdef bint find_memory(ArenaCore* core, uint64_t address, Mapped* found) noexcept:
    # The caller's share keeps the block, so that its memory stays after the lock.
    cdef bint is_shareable
    with nogil:
        is_shareable = arena_find_apart(core, APART_SHAREABLE, address, found)
    return is_shareable

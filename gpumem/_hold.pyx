"""Holding bytes for NumPy; see _hold.pxd."""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from gpumem._buffer cimport Buffer, buffer_share, drop_share
from gpumem._support.instances cimport forbid_instantiation

cdef char* BYTES_FORMAT = "B"


@cython.final
@cython.no_gc
cdef class MemoryHold:
    """Bytes of a buffer and a claim on them; it says whether they may be written."""

    cdef void* lease
    cdef uint64_t address
    cdef Py_ssize_t nbytes
    cdef bint read_only

    def __dealloc__(self):
        drop_share(self.lease)

    def __getbuffer__(self, Py_buffer* view, int flags):
        if flags & PyBUF_WRITABLE and self.read_only:
            raise BufferError("this memory is read-only")
        view.buf = <void*><uintptr_t>self.address
        view.len = self.nbytes
        view.readonly = self.read_only
        view.itemsize = 1
        view.format = BYTES_FORMAT if flags & PyBUF_FORMAT else NULL
        view.ndim = 1
        view.shape = &self.nbytes if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL
        view.obj = self


cdef object hold_bytes(Buffer buffer, uint64_t address, int64_t nbytes, bint read_only):
    cdef MemoryHold hold = MemoryHold.__new__(MemoryHold)
    hold.lease = buffer_share(buffer)
    hold.address = address
    hold.nbytes = nbytes
    hold.read_only = read_only
    return hold


forbid_instantiation(MemoryHold)

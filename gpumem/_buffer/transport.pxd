"""Registrations of blocks by transports."""

from libc.stdint cimport uint64_t

from gpumem._buffer.buffer cimport Buffer, ResourceBase
from gpumem._support.lease cimport Lease

cdef class Registration:
    cdef Lease* share           # keeps the block until `home` is None: released
    cdef ResourceBase home
    cdef uint64_t start
    cdef readonly uint64_t nbytes
    cdef bint holds_pages       # `home` counts it: sleep would unmap its block

"""Registrations of blocks by transports."""

from gpumem._buffer.buffer cimport Buffer, ResourceBase
from gpumem._support.lease cimport Lease

cdef class Registration:
    cdef Lease* share           # keeps the block until `home` is None: released
    cdef ResourceBase home
    cdef readonly object address
    cdef readonly object nbytes
    cdef bint holds_pages       # `home` counts it: sleep would unmap its block

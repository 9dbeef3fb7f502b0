"""The driver's stream-ordered pool as a resource."""

from libc.stdint cimport int32_t, uint64_t

from gpumem._buffer cimport MemoryResource
from gpumem._driver cimport CUmemoryPool, Place

# What blocks and leases need after the Python object is gone; counted by them and by it.
cdef struct PoolCore:
    int32_t references      # atomic
    bint owned              # destroy the pool with the last reference
    CUmemoryPool pool
    Place* place
    uint64_t requested      # bytes handed out, as asked (atomic)
    uint64_t num_allocs     # atomic
    uint64_t num_frees      # atomic

cdef class DriverPool(MemoryResource):
    cdef PoolCore* core
    cdef readonly object config     # PoolConfig
    cdef bint is_closed
    cdef list handles               # slot -> native stream handle
    cdef uint64_t shrinkages
    cdef uint64_t max_alloc

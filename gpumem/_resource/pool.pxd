"""The driver's stream-ordered pool as a resource."""

from gpumem._buffer cimport MemoryResource

cdef class DriverPool(MemoryResource):
    cdef readonly object config     # PoolConfig
    cdef bint is_imported           # another process's: nothing can be allocated here
    cdef bint was_exported

"""The driver's stream-ordered pool as a resource."""

from gpumem._direct cimport DirectResource

cdef class DriverPool(DirectResource):
    cdef readonly object config     # PoolConfig
    cdef bint is_imported           # another process's: nothing can be allocated here
    cdef bint was_exported

"""Managed memory: regions that migrate, and the hints that steer them."""

from libc.stdint cimport uint64_t

from gpumem._backing cimport Backing
from gpumem._driver cimport CUmem_advise, CUresult, CUstream, Place

cdef enum:
    HOST_SIDE = -1              # in place of a device's ordinal: the CPU

cdef void managed_init(Backing* backing, Place* place) noexcept nogil
# Hints, by the signature that the driver has. `where`: a device's ordinal, or HOST_SIDE.
cdef CUresult managed_advise(Place* place, uint64_t address, uint64_t nbytes, CUmem_advise advice,
                             int where) noexcept nogil
cdef CUresult managed_prefetch(Place* place, uint64_t address, uint64_t nbytes, int where,
                               CUstream stream) noexcept nogil

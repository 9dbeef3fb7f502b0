"""The driver calls behind pages, one function each; the device's context is current."""

from libc.stdint cimport uint64_t

from gpumem._driver cimport CUresult, Place

cdef CUresult address_reserve(Place* place, uint64_t nbytes, uint64_t* address) noexcept nogil
cdef CUresult address_free(Place* place, uint64_t address, uint64_t nbytes) noexcept nogil
cdef CUresult page_create(Place* place, uint64_t nbytes, uint64_t* memory) noexcept nogil
cdef CUresult page_map(Place* place, uint64_t address, uint64_t nbytes,
                       uint64_t memory) noexcept nogil
# Gives the device access to mappings that lie side by side, all of them.
cdef CUresult page_allow(Place* place, uint64_t address, uint64_t nbytes) noexcept nogil
cdef CUresult page_unmap(Place* place, uint64_t address, uint64_t nbytes) noexcept nogil
cdef CUresult page_release(Place* place, uint64_t memory) noexcept nogil

"""Pinned host memory: pages made by several threads, then registered with the driver."""

from libc.stdint cimport uint64_t

from gpumem._native.backing.device cimport Backing
from gpumem._native.driver cimport CUresult, DeviceContext

cdef extern from "host_pages.h" nogil:
    # Pages that several threads make while the caller uses those that are made.
    ctypedef struct HostPages:
        pass
    # Bytes that nobody has taken.
    size_t host_pages_left(const HostPages* pages)
    void host_pages_end(HostPages* pages)

cdef void pinned_init(Backing* backing, DeviceContext* context) noexcept nogil
# For the owner of several regions of `nbytes` together: begins to make their pages, until
# `host_pages_end`; without effect where the driver makes them. Each region is taken when it is
# needed, with the device's context, in place of a reservation, and released as one.
cdef void pinned_begin(Backing* self, HostPages* pages, uint64_t nbytes) noexcept nogil
cdef CUresult pinned_take(Backing* self, HostPages* pages, uint64_t size,
                          uint64_t* address) noexcept nogil
# ---- Pages of the host, for the family -----------------------------------------------------------

# Registers pages with the driver, under one address for the CPU and the device, and records them as
# a mapping of the backing. With the device's context; a refusal leaves them unregistered.
cdef CUresult pages_pin(Backing* self, uint64_t pages, uint64_t nbytes,
                        uint64_t memory) noexcept nogil
# Is every page of a range mapped in this process?
cdef bint pages_exist(uint64_t address, uint64_t nbytes) noexcept nogil

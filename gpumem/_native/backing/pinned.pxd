"""Pinned host memory: pages made by several threads, then registered with the driver."""

from libc.stdint cimport uint64_t

from gpumem._native.backing.device cimport Backing
from gpumem._native.driver cimport CUresult, DeviceContext

cdef void pinned_init(Backing* backing, DeviceContext* context) noexcept nogil
# ---- Pages of the host, for the family -----------------------------------------------------------

# Registers pages with the driver, under one address for the CPU and the device, and records them as
# a mapping of the backing. With the device's context; a refusal leaves them unregistered.
cdef CUresult pages_pin(Backing* self, uint64_t pages, uint64_t nbytes,
                        uint64_t memory) noexcept nogil
# Is every page of a range mapped in this process?
cdef bint pages_exist(uint64_t address, uint64_t nbytes) noexcept nogil

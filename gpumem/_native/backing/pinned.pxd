"""Pinned host memory: pages made by several threads, then registered with the driver."""

from libc.stdint cimport uint64_t

from gpumem._native.backing.device cimport Backing
from gpumem._native.driver cimport CUresult, DeviceContext

cdef void pinned_init(Backing* backing, DeviceContext* context) noexcept nogil


# ---- Pages of the host: mapped, placed on a NUMA node, and made by several threads at once


cdef enum:
    HUGE_PAGE = 2097152         # bytes; mappings begin at a multiple of it

# Bytes that a mapping of so many bytes takes: whole pages, no more.
cdef uint64_t pages_round(uint64_t nbytes) noexcept nogil
# Maps pages and makes all of them now. `node`: where they are wanted; -1: anywhere. 0: no memory.
cdef uint64_t pages_map(uint64_t nbytes, int node) noexcept nogil
cdef void pages_unmap(uint64_t address, uint64_t nbytes) noexcept nogil
# Registers pages with the driver, under one address for the CPU and the device, and records them as
# a mapping of the backing. With the device's context; a refusal leaves them unregistered.
cdef CUresult pages_pin(Backing* self, uint64_t pages, uint64_t nbytes,
                        uint64_t memory) noexcept nogil
# Is every page of a range mapped in this process?
cdef bint pages_exist(uint64_t address, uint64_t nbytes) noexcept nogil

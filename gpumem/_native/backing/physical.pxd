"""Regions that are one physical handle each, by the driver's virtual memory, or one file each.

Handles are of host memory of one NUMA node, for the CPU and the device, or of memory that can be
shared with other processes; files are of host memory that can be.
"""

from libc.stdint cimport uint64_t

from gpumem._native.backing.device cimport Backing
from gpumem._native.driver cimport CUresult, DeviceContext

cdef void numa_init(Backing* backing, DeviceContext* context, int node) noexcept nogil
# Makes the least of a node's memory and gives it back. A refusal names the call that refused.
cdef CUresult numa_try(DeviceContext* context, int node, const char** call) noexcept nogil
# Memory of the device, or of a node, that can be exported. Regions are cleared: another process may
# have used the memory before.
cdef enum:
    THE_DEVICE = -1             # in place of a node
cdef void shared_init(Backing* backing, DeviceContext* context, int node) noexcept nogil
# A new descriptor of the region's memory.
cdef CUresult shared_export(Backing* self, uint64_t memory, int* fd) noexcept nogil


# ---- Regions of host memory that other processes may be given: a file in memory for each ---------


cdef void file_init(Backing* backing, DeviceContext* context) noexcept nogil

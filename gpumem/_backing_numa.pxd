"""Host memory of one NUMA node, by the driver's virtual memory: for the CPU and the device."""

from gpumem._backing cimport Backing
from gpumem._driver cimport CUresult, Place

cdef void numa_init(Backing* backing, Place* place, int node) noexcept nogil
# Makes the least of a node's memory and gives it back. A refusal names the call that refused.
cdef CUresult numa_try(Place* place, int node, const char** call) noexcept nogil

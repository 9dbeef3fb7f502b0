"""The host device for compiled modules: the functions that are not in the driver table."""

from libc.stdint cimport uint64_t

cdef void host_advance_clock(uint64_t nanoseconds) noexcept nogil
# A HostdevControls of hostdev/instruments/controls.h, for gpumem/_testing.
cdef const void* host_controls() noexcept nogil

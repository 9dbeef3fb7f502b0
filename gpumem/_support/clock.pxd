"""The clocks of the system, in nanoseconds."""

from libc.stdint cimport uint64_t
from posix.time cimport clock_gettime, CLOCK_MONOTONIC, CLOCK_REALTIME, clockid_t, timespec

cdef inline uint64_t read_clock(clockid_t which) noexcept nogil:
    cdef timespec now
    clock_gettime(which, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


cdef inline uint64_t clock_ns() noexcept nogil:
    return read_clock(CLOCK_MONOTONIC)


cdef inline uint64_t time_of_day_ns() noexcept nogil:
    return read_clock(CLOCK_REALTIME)

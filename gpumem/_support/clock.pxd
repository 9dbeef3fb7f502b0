"""The clocks of the system, in nanoseconds, and sleeping by them."""

from libc.stdint cimport uint64_t
from posix.time cimport (
    clock_gettime, CLOCK_MONOTONIC, CLOCK_REALTIME, clockid_t, nanosleep, timespec,
)

cdef inline uint64_t read_clock(clockid_t which) noexcept nogil:
    cdef timespec now
    clock_gettime(which, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


cdef inline uint64_t clock_ns() noexcept nogil:
    return read_clock(CLOCK_MONOTONIC)


cdef inline uint64_t time_of_day_ns() noexcept nogil:
    return read_clock(CLOCK_REALTIME)


cdef inline bint sleep_ns(uint64_t nanoseconds) noexcept nogil:
    # Returns False if the handler of a signal ended it early.
    cdef timespec pause
    pause.tv_sec = nanoseconds // 1000000000
    pause.tv_nsec = nanoseconds % 1000000000
    return nanosleep(&pause, NULL) == 0

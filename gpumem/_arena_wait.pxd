"""Out of memory: waiting on the host for work that other streams have queued.

The last resort, when the driver and every other source have refused. No lock is held meanwhile. The
wait is bounded, because a stream may itself wait for what this very thread does next; and an event
that was waited for in vain once is not waited for again until it has completed.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore

# True: something has become free since, try again. `until` is 0 at first, then the moment (ns of
# the monotonic clock) at which the allocation gives up.
cdef bint wait_for_streams(ArenaCore* arena, uint32_t taker, uint64_t* until) noexcept nogil

# A pause.
cdef void sleep(uint64_t nanoseconds) noexcept nogil

"""Stream slots of an arena: who freed what behind which event. See _arena_types for the rules.

"With the lock" means that the caller holds `arena.lock`; a function that must call the driver
gives it up meanwhile and takes it again, and `asking` keeps others off the slot.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore
from gpumem._bfc cimport Bfc

# Everything freed on the stream up to now is free for everyone, every use of it has ended.
cdef void complete_all(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Waits until everything queued on the device has finished; then all that was freed is free for
# everyone. No block is handed out.
cdef void drain_streams(ArenaCore* arena) noexcept nogil

# With the lock: was anything freed on the stream served last that no outstanding event covers?
cdef bint switch_needs_event(const ArenaCore* arena) noexcept nogil
# Serves another stream from now on; records the event that is needed.
cdef void switch_stream(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Asks the event of every other stream once; what has completed becomes free for everyone. So do
# parked blocks, for their own stream.
cdef bint release_completed(ArenaCore* arena, uint32_t taker) noexcept nogil
# With the lock: does memory wait for the stream that the taker could have?
cdef bint is_worth_asking(const ArenaCore* arena, uint32_t stream_slot,
                          uint32_t taker) noexcept nogil
# With the lock, given up meanwhile: asks a stream's event, records one if there is none.
cdef bint end_epochs(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# With the lock: takes another stream's unfinished block and makes the taker's stream wait for
# that stream on the device; a parked block, too. NIL if none fits.
cdef uint32_t allocate_behind(ArenaCore* arena, Bfc* table, uint64_t nbytes,
                              uint32_t taker) noexcept nogil
# With the lock, given up meanwhile: is the taker's stream behind an epoch of another now? Makes it
# wait on the device if it has to.
cdef bint order_behind(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch,
                       uint32_t taker) noexcept nogil
# With the lock: makes the taker's stream wait for what was freed on all others, and notes in
# their stream slots up to which epoch; forget_waits takes the notes back.
cdef void wait_for_others(ArenaCore* arena, uint32_t taker) noexcept nogil
cdef void forget_waits(ArenaCore* arena) noexcept nogil
# Destroys the pooled events; nobody uses the arena any more.
cdef void destroy_events(ArenaCore* arena) noexcept nogil

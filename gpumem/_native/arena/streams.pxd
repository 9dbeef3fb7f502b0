"""Stream slots of an arena: who freed what behind which event. See arena/types for the rules.

"With the lock" means that the caller holds `arena.lock`; a function that must call the driver
gives it up meanwhile and takes it again, and `asking` keeps others off the slot.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, ThreadMark
from gpumem._native.bfc cimport Bfc
from gpumem._native.driver cimport CUstream
from gpumem._support.lease cimport Uses

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


# ---- Slots of an arena's streams: found, made, named by others, vacated --------------------------


# Finds or makes the slot of a stream; `fresh`: it named no stream or another one before. 0 and 1
# both name the legacy default stream; 2 names a different stream in each thread. May call the
# driver, to find slots that nothing is marked with.
cdef int arena_stream(ArenaCore* arena, CUstream handle, uint32_t* stream_slot,
                      bint* fresh) noexcept nogil
# The same, and claims the slot before anybody could vacate it.
cdef int arena_claim_stream(ArenaCore* arena, CUstream handle, uint32_t* stream_slot) noexcept nogil
# With the lock, or before anybody else knows the arena. Retains the thread.
cdef int add_stream(ArenaCore* arena, CUstream handle, ThreadMark* thread,
                    uint32_t* stream_slot) noexcept nogil
# While claimed a slot keeps its stream.
cdef void slot_claim(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
cdef void slot_unclaim(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Another stream uses a live block, too. ARENA_NO_METADATA: nothing changed.
cdef int arena_record(ArenaCore* arena, Uses** uses, uint32_t stream_slot) noexcept nogil
# The caller has drained the stream: everything freed on it up to now is free for everyone.
# `silent`: from here on its handle may name nothing, and the driver is not asked about it until
# somebody names it again. True: the slot names no stream any more.
cdef bint arena_reset_stream(ArenaCore* arena, uint32_t stream_slot, bint silent) noexcept nogil
cdef void streams_free(ArenaCore* arena) noexcept nogil


# ---- Blocks that were freed while other streams may still use them -------------------------------
#
# At the free, `Uses` of the block becomes a list of (stream, running epoch) and the block is
# parked:
# neither in use nor free. An epoch counts as done when an event behind it has completed or its
# stream
# was reset. When all are done the block becomes free in the slot of the stream it was freed on.
#
# Every function with the arena lock held, but for `let_go`.


# Parks a live block that is freed on `stream` and takes `uses` over. False, with `uses` let go, if
# there is nothing to wait for or the block is a stranger: it is to be freed as any other.
cdef bint free_later(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                     Uses* uses) noexcept nogil
# Ends recorded uses of a block that nothing waits for any more. Needs no lock.
cdef void uses_let_go(ArenaCore* arena, Uses* uses) noexcept nogil
# Frees what waits for nothing any more; was there anything?
cdef bint free_completed(ArenaCore* arena) noexcept nogil
# Frees everything, done or not: no block is handed out any more.
cdef void free_all_pending(ArenaCore* arena) noexcept nogil
# The smallest parked block of the table that holds `size` bytes; NULL: none.
cdef Uses* pending_free_best(ArenaCore* arena, const Bfc* table, uint64_t size) noexcept nogil
# Is it still parked? Asked after the lock was given up.
cdef bint is_pending_free(const ArenaCore* arena, const Uses* uses, uint64_t handle) noexcept nogil
# Frees it for a stream that waits on the device for everything that uses it.
cdef void free_pending_behind(ArenaCore* arena, Uses* uses, uint32_t taker) noexcept nogil


# ---- Out of memory: waiting on the host for work that other streams have queued ------------------
#
# The last resort, when the driver and every other source have refused. No lock is held meanwhile.
# The
# wait is bounded, because a stream may itself wait for what this very thread does next; and an
# event
# that was waited for in vain once is not waited for again until it has completed.


# True: something has become free since, try again. `until` is 0 at first, then the moment (ns of
# the monotonic clock) at which the allocation gives up.
cdef bint wait_for_streams(ArenaCore* arena, uint32_t taker, uint64_t* until) noexcept nogil

# A pause.
cdef void sleep(uint64_t nanoseconds) noexcept nogil

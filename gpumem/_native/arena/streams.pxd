"""How a freed block becomes reusable by another stream.

A free is stamped with the running epoch of its stream. An event recorded after the work closes the
epoch; when the event has completed, memory freed in the epoch is free for every stream. A block
with recorded uses is pending free until its epoch on each of those streams is done. Where nothing
has completed, the requesting stream waits on the device, or at last the host waits. arena/types has
the rules.

`lock` is that of the arena. A function that calls the driver releases it during the call;
`in_driver` then keeps other threads off the slot.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, ThreadMark
from gpumem._native.bfc cimport Bfc
from gpumem._native.driver cimport CUresult, CUstream
from gpumem._support.atomics cimport load32
from gpumem._support.lease cimport Uses

# Makes all memory that was freed on the stream up to now free for every stream: its work is done.
cdef void complete_all(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# The same of every stream.
cdef void complete_streams(ArenaCore* arena) noexcept nogil
# The same of the streams that a poll of their events finds done, under every policy.
cdef void complete_done_streams(ArenaCore* arena) noexcept nogil
# Waits for the work that was queued before the frees of every stream, except captures and streams
# that cannot be named. `interrupted` as below.
cdef void wait_for_frees(ArenaCore* arena, bint* interrupted) noexcept nogil
# The same as complete_streams, after that wait; for the device if it left some work unknown.
# `interrupted`: Ctrl-C ended the wait, nothing changed; NULL: nothing ends it.
cdef void drain_streams(ArenaCore* arena, bint* interrupted) noexcept nogil
# Polls every stream. Returns whether one has work that is not known to be done.
cdef bint streams_may_work(ArenaCore* arena) noexcept nogil
# Returns the opposite. Queries the streams themselves first: an event that is recorded for the
# query is done some microseconds later.
cdef bint streams_are_done(ArenaCore* arena) noexcept nogil
# Records the missing events, because the handles of streams are not kept alive for the arena any
# more; all but the default streams are then in STREAM_LEFT.
cdef void leave_streams(ArenaCore* arena) noexcept nogil
# Waits until everything queued on the device has finished.
cdef CUresult wait_for_device(ArenaCore* arena) noexcept nogil

# Serves another stream from now on, and records the event that is needed, if any. Then several
# streams free blocks: from here on a mark spreads less, see bfc/table.
cdef void switch_stream(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Polls the event of every other stream once; what has completed becomes free for every stream,
# pending-free blocks for their own.
cdef bint release_completed(ArenaCore* arena, uint32_t requesting) noexcept nogil
cdef void mark_remainders_dirty(ArenaCore* arena, uint32_t requesting) noexcept nogil
# Caller holds `lock`. Returns whether a poll of the stream's event may free memory for the
# requesting stream.
cdef bint is_worth_polling(const ArenaCore* arena, uint32_t stream_slot,
                           uint32_t requesting) noexcept nogil
# Makes memory that threads have cached, and memory that no stream uses any more, free for every
# stream, so that regions and pages without a block are seen to be idle.
cdef void find_idle(ArenaCore* arena) noexcept nogil
# Caller holds `lock`. Returns whether the stream may have work that no completed event covers.
cdef inline bint has_unknown_work(const ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    return load32(&arena.streams[stream_slot].dirty) or arena.streams[stream_slot].event_epoch != 0
# Caller holds `lock`, which is released for the driver. Polls a stream's event, and records one if
# there is none.
cdef bint end_epochs(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Caller holds `lock`, which is released for the driver. If the stream is idle now, its epochs end.
cdef void query_stream(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Queries the driver whether the streams are idle that a block is marked with, or that have work
# without a known end. A stream that is being captured counts as idle.
cdef bint streams_are_idle(ArenaCore* arena) noexcept nogil
# Caller holds `lock`. Allocates a block with unfinished work of another stream, or a pending-free
# block, and makes the requesting stream wait for that work on the device. NIL: none fits; *status
# is set if a budget refuses the block.
cdef uint32_t allocate_behind(ArenaCore* arena, Bfc* table, uint64_t nbytes, uint32_t requesting,
                              int* status) noexcept nogil
# Caller holds `lock`, which is released for the driver. Records an event after the epoch if there
# is none. Returns whether the epoch is done or has an event.
cdef bint cover_epoch(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch) noexcept nogil
# Caller holds `lock`, which is released for the driver. Makes the requesting stream wait on the
# device for an epoch of another stream that is done or has an event after it. After this an
# allocation is not refused any more: nothing takes the wait back. False: the driver refused.
cdef bint wait_behind(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch,
                      uint32_t requesting) noexcept nogil
# Caller holds `lock`, which is released for the driver. Records an event on every other stream
# that has freed memory.
cdef void record_events_of_others(ArenaCore* arena, uint32_t requesting) noexcept nogil
# Caller holds `lock` from the call that turns it on to the one that turns it off. In between a plan
# may use memory of other streams, if an event marks its end. A caller that uses the memory has to
# call wait_behind.
cdef void set_cross_stream_search(ArenaCore* arena, uint32_t requesting, bint on) noexcept nogil
# Destroys the pooled events; no thread uses the arena any more.
cdef void destroy_events(ArenaCore* arena) noexcept nogil

# ---- Slots of an arena's streams: found, made, named by others, vacated --------------------------

# Finds or makes the slot of a stream; `fresh`: it named no stream or another one before. `retain`:
# the slot is retained before another thread could vacate it. 0 and 1 both name the legacy default
# stream; 2 names a different stream in each thread. May call the driver, to find slots that nothing
# is marked with.
cdef int arena_stream(ArenaCore* arena, CUstream handle, bint retain, uint32_t* stream_slot,
                      bint* fresh) noexcept nogil
# Returns whether the handle names the same stream for the calling thread.
cdef bint arena_stream_is_callers(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Caller holds `lock`, or is the only thread that has the arena. Retains the thread.
cdef int add_stream(ArenaCore* arena, CUstream handle, ThreadMark* thread,
                    uint32_t* stream_slot) noexcept nogil
# While retained a slot keeps its stream.
cdef void slot_retain(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
cdef void slot_drop(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
# Records that another stream uses a live block, too. ARENA_NO_METADATA: nothing changed.
cdef int arena_record(ArenaCore* arena, Uses** uses, uint32_t stream_slot) noexcept nogil
# The caller has drained the stream: everything freed on it up to now is free for every stream.
# `may_end`: the stream may end from here on, so that its handle is not passed to the driver until a
# caller names it again. True: the slot is vacant now.
cdef bint arena_reset_stream(ArenaCore* arena, uint32_t stream_slot,
                             bint may_end) noexcept nogil
cdef void streams_free(ArenaCore* arena) noexcept nogil

# ---- Pending-free blocks: freed while other streams may still use them ---------------------------
#
# At the free, `Uses` of the block becomes a list of (stream, running epoch) and the block is
# pending free: neither in use nor free. An epoch is done when an event after it has completed or
# its stream was reset. When all are done the block becomes free in the slot of the stream it was
# freed on.
#
# Caller holds `lock`, unless a comment says otherwise.

# Begins the pending free of a live block on `stream_slot` and takes ownership of `uses`. False,
# with `uses` released, if there is nothing to wait for or the handle is stale: free it as any
# other.
cdef bint free_later(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                     Uses* uses) noexcept nogil
# Ends recorded uses of a block that nothing waits for any more. Needs no lock.
cdef void uses_release(ArenaCore* arena, Uses* uses) noexcept nogil
# Returns whether the work of every stamped use is done.
cdef bint uses_done(const ArenaCore* arena, const Uses* uses) noexcept nogil
# Frees the blocks that no stream uses any more. Returns whether there was any.
cdef bint free_completed(ArenaCore* arena) noexcept nogil
# Caller does not hold `lock`. Frees all pending-free blocks, done or not; no block is in use.
cdef void free_all_pending(ArenaCore* arena) noexcept nogil

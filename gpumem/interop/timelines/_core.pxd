"""Timelines below Python: the page, what each device has of it, which streams use it.

Functions return a `CoreStatus`; `Outcome` has the details of a failure for its message.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from gpumem._native.driver cimport (
    CUdeviceptr, CUevent, CUexternalSemaphore, CUresult, CUstream, DeviceContext,
)
from gpumem._support.lock cimport Lock
from gpumem._support.retired cimport Retired

cdef extern from "timeline_peers.h" nogil:
    ctypedef struct TimelinePage:
        pass
    enum:
        TIMELINE_PAGE_BYTES
        PEER_NONE
    const uint64_t TIMELINE_LARGEST
    const uint64_t TIMELINE_REMOVED
    ctypedef enum TimelineStatus:
        TIMELINE_OK
        TIMELINE_LATE
        TIMELINE_POISONED
        TIMELINE_GONE
    uint64_t timeline_now()
    void timeline_page_build(TimelinePage* page, uint64_t initial)
    bint timeline_page_is_ours(const TimelinePage* page)
    uint64_t timeline_value(TimelinePage* page)
    uint64_t timeline_pending(TimelinePage* page)
    bint timeline_is_poisoned(TimelinePage* page)
    bint timeline_claim(TimelinePage* page, uint64_t value, uint64_t* known)
    bint timeline_move(TimelinePage* page, uint64_t before, uint64_t to)
    bint timeline_is_polled(TimelinePage* page)
    void timeline_signal(TimelinePage* page, uint64_t value)
    void timeline_poison(TimelinePage* page)
    void timeline_poll(TimelinePage* page)
    TimelineStatus timeline_look(TimelinePage* page, uint64_t value)
    TimelineStatus timeline_wait(TimelinePage* page, uint64_t value, uint64_t deadline,
                                 uint64_t spin)
    bint timeline_own_file(int file)
    uint64_t timeline_process_mark()
    int timeline_attach(TimelinePage* page, int file, uint64_t mark, uint32_t turn)
    void timeline_detach(TimelinePage* page, int file, int entry)
    uint64_t timeline_deserted(TimelinePage* page, int file, uint64_t mark)

cdef enum CoreStatus:
    CORE_OK = TIMELINE_OK
    CORE_LATE = TIMELINE_LATE           # the deadline passed
    CORE_POISONED = TIMELINE_POISONED
    CORE_REMOVED = TIMELINE_GONE        # its device was removed
    CORE_LOST                           # a device with streams that use it is lost: `code`
    CORE_DESERTED                       # the last other process died
    CORE_NOT_ABOVE                      # `known` is not below the value
    CORE_DRIVER                         # the driver's `call` returned `code`
    CORE_SYSTEM                         # a system call failed with errno `system`
    CORE_NO_MEMORY

cdef struct Outcome:
    const char* call        # static text
    CUresult code
    int system              # errno
    uint64_t known          # highest value signalled or queued before
    DeviceContext* context  # of the device that is lost
    uint64_t process        # id of the process that died

# One device's access to the timeline: the semaphore or memory that its streams wait on and write.
cdef struct Link:
    DeviceContext* context
    CUexternalSemaphore semaphore   # NULL: memory, by stream memory operations; or not yet
    void* alias                     # a second mapping of the page, registered; NULL: a semaphore
    CUdeviceptr address             # of that mapping, on the device
    Link* next

# The latest wait or signal that was queued on one stream.
cdef struct Use:
    DeviceContext* context
    CUstream stream
    uint64_t thread         # of its default stream, where each thread has its own; else 0
    CUevent event
    bint recorded           # False: recording failed; the stream itself is queried
    Use* next

# Driver calls are made with the lock held, and a driver may block a caller until a stream has room.
# So a signal of the CPU, which may let that stream continue, never takes the lock.
cdef struct TimelineCore:
    Lock lock               # protects what follows `queued`
    TimelinePage* page      # NULL: only the driver can read the value
    int fd                  # the page's file; -1: none. Once attached: a description of its own
    int peer                # this process's entry among the page's peers
    bint attached
    uint32_t generation     # the process (see _support/process) that the rest is valid in
    uint64_t pending        # highest value that this process signalled or queued; without a page
    uint64_t queued         # highest value that streams of this process will signal
    Use* signaller          # the stream of the latest signal; NULL: done, or the CPU
    Link* links
    Use* uses
    bint listed             # among the cores that streams use
    TimelineCore* next
    TimelineCore* previous
    TimelineCore* next_peer         # among the cores of this process that have a page
    TimelineCore* previous_peer
    Retired end

# ---- Waits and signals ---------------------------------------------------------------------------
#
# Values are from 1 to TIMELINE_LARGEST, which callers ensure. A failure leaves the timeline as it
# was. None of these waits for a device, except `core_signal`; see its comment.

# The stream's later work starts when the value is reached: at once, without a driver call, if the
# page has the value already.
cdef int core_enqueue_wait(TimelineCore* core, DeviceContext* context, CUstream stream,
                           uint64_t value, Outcome* out) noexcept nogil
# Signals the value when the stream's earlier work is done. Signals take effect in the order in
# which they were queued, also on different streams.
cdef int core_enqueue_signal(TimelineCore* core, DeviceContext* context, CUstream stream,
                             uint64_t value, Outcome* out) noexcept nogil
# The CPU signals; there is a page. A lower value that a device has yet to store comes first:
# CORE_LATE if it was not stored by the deadline, and nothing was signalled. With a deadline of 0 it
# makes no driver call, so that the interpreter lock may be held.
cdef int core_signal(TimelineCore* core, uint64_t value, uint64_t deadline,
                     Outcome* out) noexcept nogil
# Signals on a stream of its own, where there is no page.
cdef int core_signal_by_stream(TimelineCore* core, DeviceContext* context, uint64_t value,
                               Outcome* out) noexcept nogil
# Waits until the value is reached or the deadline (ns, monotonic) passed; spins for `spin` ns
# before it sleeps. There is a page.
cdef int core_wait(TimelineCore* core, uint64_t value, uint64_t deadline, uint64_t spin,
                   Outcome* out) noexcept nogil
# The same where there is no page: queue a wait on a stream of its own, poll that stream, destroy
# it. The wait stays queued, as a use, if it is not over by then.
cdef int core_wait_begin(TimelineCore* core, DeviceContext* context, CUstream* stream,
                         uint64_t value, Outcome* out) noexcept nogil
cdef int core_wait_go_on(DeviceContext* context, CUstream stream, uint64_t deadline,
                         Outcome* out) noexcept nogil
cdef void core_wait_end(DeviceContext* context, CUstream stream) noexcept nogil
# Waits until no stream uses the timeline any more; CORE_LATE if some still do.
cdef int core_wait_idle(TimelineCore* core, uint64_t deadline) noexcept nogil
cdef uint64_t core_pending(TimelineCore* core) noexcept nogil

# ---- Life ----------------------------------------------------------------------------------------

# Takes over the page and the descriptor; on NULL the caller keeps both.
cdef TimelineCore* core_new(TimelinePage* page, int fd) noexcept nogil
# A new link of the device, which has nothing yet; NULL: out of host memory.
cdef Link* core_make_link(TimelineCore* core, DeviceContext* context) noexcept nogil
# Before an operation is queued on a stream: puts the core on the list of those that streams use.
cdef void core_list(TimelineCore* core) noexcept nogil
# In a forked child: forgets the objects of the parent's drivers and joins the page anew.
cdef void core_after_fork(TimelineCore* core) noexcept nogil
# After the last call: releases the core now, or `release_retired_cores` does it. Never blocks.
cdef void core_retire(TimelineCore* core) noexcept nogil
# Releases retired cores once their streams are done; never waits for a device.
cdef void release_retired_cores() noexcept nogil
# Whether a stream of the context may still wait for a timeline. Then a driver call that waits for
# the device may wait for a value that the calling thread has yet to signal.
cdef bint timelines_in_use(DeviceContext* context) noexcept nogil

# For tests: the host device's streams use memory operations, as a GPU's do.
cdef void rehearse_memory_operations(bint on) noexcept nogil

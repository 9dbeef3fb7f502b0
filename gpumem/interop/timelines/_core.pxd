"""C level: what a timeline is below Python. Its page, what devices have of it, who uses it.

Functions return a `CoreStatus`; `Outcome` has what a person wants to know of a failure.
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
    int timeline_attach(TimelinePage* page)
    void timeline_detach(TimelinePage* page, int entry)
    uint64_t timeline_deserted(TimelinePage* page)

cdef enum CoreStatus:
    CORE_OK = TIMELINE_OK
    CORE_LATE = TIMELINE_LATE           # the deadline passed
    CORE_POISONED = TIMELINE_POISONED
    CORE_REMOVED = TIMELINE_GONE        # its device was removed
    CORE_DESERTED                       # the last other process died
    CORE_NOT_ABOVE                      # `known` is not below the value
    CORE_DRIVER                         # `call` answered `code`
    CORE_SYSTEM                         # a system call failed with errno `code`
    CORE_NO_MEMORY

cdef struct Outcome:
    const char* call        # static text
    CUresult code
    int system              # errno
    uint64_t known          # highest value signalled or queued before
    uint64_t process        # the one that died

# What one device has of the timeline: what its streams wait on and write.
cdef struct Link:
    DeviceContext* context
    CUexternalSemaphore semaphore   # NULL: memory, by stream memory operations; or not yet
    void* alias                     # the page once more, registered; NULL: a semaphore
    CUdeviceptr address             # of that, for the device
    Link* next

# The last wait or signal that one stream was given.
cdef struct Use:
    DeviceContext* context
    CUstream stream
    uint64_t thread         # whose default stream, where each thread has its own; else 0
    CUevent event
    bint recorded           # False: the event could not be; the stream itself is asked
    Use* next

# Driver calls are made with the lock held, and a driver may keep a caller waiting until a stream
# has room, so what lets streams go on, a signal of the CPU, never takes it.
cdef struct TimelineCore:
    Lock lock               # what follows `queued`
    TimelinePage* page      # NULL: only the driver knows the value
    int fd                  # the page's file; -1: none
    int peer                # our entry among the page's peers
    bint attached
    uint32_t generation     # of the process that the rest is true for
    uint64_t pending        # highest that this process signalled or queued; where no page tells
    uint64_t queued         # highest that its streams are to signal
    Use* signaller          # whose signal was the latest; NULL: done, or the CPU's
    Link* links
    Use* uses
    bint listed             # among those that streams were given
    TimelineCore* next
    TimelineCore* previous
    Retired end             # among those that finalizers left

# ---- life ----
# The page is the core's from here on, and so is the descriptor; on NULL both are the caller's.
cdef TimelineCore* core_new(TimelinePage* page, int fd) noexcept nogil
# In a forked child: what the parent's drivers had is not ours, the page is.
cdef void core_after_fork(TimelineCore* core) noexcept nogil
# Nobody calls it any more: it is given back now, or by a later `cores_reap`. Never blocks.
cdef void core_retire(TimelineCore* core) noexcept nogil
# Give back what is retired and done; never waits for a device.
cdef void cores_reap() noexcept nogil
# Does a stream of the context still have to do with a timeline? Then a driver call that waits for
# the device may wait for a value that its caller has yet to signal.
cdef bint timelines_hold(DeviceContext* context) noexcept nogil
# Before a stream is given something: those who give back have to know of it.
cdef void core_list(TimelineCore* core) noexcept nogil

# ---- uses; the lock is held, the context entered ----
cdef Use* use_for(TimelineCore* core, DeviceContext* context, CUstream stream,
                  CUresult* code) noexcept nogil
cdef void use_record(Use* used) noexcept nogil
cdef bint core_idle(TimelineCore* core) noexcept nogil          # takes the lock, or says no

# ---- links; the lock is held, the context entered ----
cdef int core_link_memory(TimelineCore* core, DeviceContext* context, Link** link,
                          Outcome* out) noexcept nogil
cdef int core_link_page(TimelineCore* core, DeviceContext* context, Link** link,
                        Outcome* out) noexcept nogil
cdef int core_add_semaphore(TimelineCore* core, DeviceContext* context,
                            CUexternalSemaphore semaphore) noexcept nogil
cdef Link* core_link(TimelineCore* core, DeviceContext* context) noexcept nogil


# ---- C level: waits and signals of a timeline, by streams and by the CPU -------------------------
#
# Values are from 1 to TIMELINE_LARGEST; callers see to that. A failure leaves the timeline as it
# was. None of these waits for a device, except `core_signal`, as its comment says.


# A stream's work from here on starts when the value is reached. At once, without a driver call,
# if the page says that it is.
cdef int core_enqueue_wait(TimelineCore* core, DeviceContext* context, CUstream stream,
                           uint64_t value, Outcome* out) noexcept nogil
# The value is signalled when all that the stream was given so far is done. Signals take effect in
# the order in which they were queued, also on different streams.
cdef int core_enqueue_signal(TimelineCore* core, DeviceContext* context, CUstream stream,
                             uint64_t value, Outcome* out) noexcept nogil

# The CPU signals; the page is there. While a device still has to store a lower value, that comes
# first: CORE_LATE says that it had not by the deadline, and that nothing was signalled.
cdef int core_signal(TimelineCore* core, uint64_t value, uint64_t deadline,
                     Outcome* out) noexcept nogil
# Wait until the value is reached, but not beyond the deadline (ns, monotonic); look for `spin` ns
# before sleeping. The page is there.
cdef int core_wait(TimelineCore* core, uint64_t value, uint64_t deadline, uint64_t spin,
                   Outcome* out) noexcept nogil
# The same where no page is: queue a wait on a stream of its own, ask for it, be done with it. One
# that is ended before it is over stays queued, as a use.
cdef int core_wait_begin(TimelineCore* core, DeviceContext* context, CUstream* stream,
                         uint64_t value, Outcome* out) noexcept nogil
cdef int core_wait_go_on(DeviceContext* context, CUstream stream, uint64_t deadline,
                         Outcome* out) noexcept nogil
cdef void core_wait_end(DeviceContext* context, CUstream stream) noexcept nogil
# Signal on a stream of its own, where there is no page.
cdef int core_signal_by_stream(TimelineCore* core, DeviceContext* context, uint64_t value,
                               Outcome* out) noexcept nogil
# Wait until no stream uses the timeline any more; CORE_LATE if some still do.
cdef int core_wait_idle(TimelineCore* core, uint64_t deadline) noexcept nogil
cdef uint64_t core_pending(TimelineCore* core) noexcept nogil

# Rehearsal: the host device's streams use memory operations too, as a GPU's do.
cdef void rehearse_memory_operations(bint on) noexcept nogil

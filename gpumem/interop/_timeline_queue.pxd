"""C level: waits and signals of a timeline, by streams and by the CPU.

Values are from 1 to TIMELINE_LARGEST; callers see to that. A failure leaves the timeline as it
was. None of these waits for a device, except `core_signal`, as its comment says.
"""

from libc.stdint cimport uint64_t

from gpumem._driver cimport CUstream, Place
from gpumem.interop._timeline_core cimport Outcome, TimelineCore

# A stream's work from here on starts when the value is reached. At once, without a driver call,
# if the page says that it is.
cdef int core_enqueue_wait(TimelineCore* core, Place* place, CUstream stream, uint64_t value,
                           Outcome* out) noexcept nogil
# The value is signalled when all that the stream was given so far is done. Signals take effect in
# the order in which they were queued, also on different streams.
cdef int core_enqueue_signal(TimelineCore* core, Place* place, CUstream stream, uint64_t value,
                             Outcome* out) noexcept nogil

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
cdef int core_wait_begin(TimelineCore* core, Place* place, CUstream* stream, uint64_t value,
                         Outcome* out) noexcept nogil
cdef int core_wait_go_on(Place* place, CUstream stream, uint64_t deadline,
                         Outcome* out) noexcept nogil
cdef void core_wait_end(Place* place, CUstream stream) noexcept nogil
# Signal on a stream of its own, where there is no page.
cdef int core_signal_by_stream(TimelineCore* core, Place* place, uint64_t value,
                               Outcome* out) noexcept nogil
# Wait until no stream uses the timeline any more; CORE_LATE if some still do.
cdef int core_wait_idle(TimelineCore* core, uint64_t deadline) noexcept nogil
cdef uint64_t core_pending(TimelineCore* core) noexcept nogil

# Rehearsal: the host device's streams use memory operations too, as a GPU's do.
cdef void rehearse_memory_operations(bint on) noexcept nogil

"""Handles of the two streams that every device has; when unused slots of streams are vacated."""

from libc.stdint cimport uint32_t

cdef enum:
    LEGACY_STREAM = 1           # the device's legacy default stream; handle 0 means it too
    PER_THREAD_STREAM = 2       # the calling thread's default stream; never remembered

# A resource has a slot for each stream that it was called with. A slot that no block names is kept
# for a while, because its stream is likely to be named again.
cdef enum:
    MIN_RECLAIM_SLOTS = 32      # fewer slots are not worth a scan

# Whether a scan for unused slots is due before one is added. `reclaim_at` is in slots.
cdef inline bint reclaim_is_due(uint32_t slots, uint32_t vacant,
                                uint32_t reclaim_at) noexcept nogil:
    return vacant == 0 and slots >= MIN_RECLAIM_SLOTS and slots >= reclaim_at

# The `reclaim_at` after a scan: twice as many as are in use, so that scans cost little per stream.
cdef inline uint32_t reclaim_next(uint32_t slots, uint32_t vacant) noexcept nogil:
    return 2 * (slots - vacant)

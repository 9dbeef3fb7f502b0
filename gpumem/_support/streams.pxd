"""Handles of the two streams that every device has without creating them."""

cdef enum:
    LEGACY_STREAM = 1           # the device's legacy default stream; handle 0 means it too
    PER_THREAD_STREAM = 2       # the calling thread's default stream; never remembered

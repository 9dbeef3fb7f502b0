"""A look at a resource's counters that disturbs nobody: no lock, no driver call, no interpreter.

Each word is read whole, by a relaxed load; what belongs together is read twice, and again while it
differs, so at rest all of it is exact. Where threads allocate meanwhile it may be apart by the
blocks that they are at, and while a cache is emptied by what rested there; the counts of blocks
never fall. A block that another thread freed counts as in use until its owner's cache collects it.
"""

from libc.stdint cimport uint64_t

from gpumem._support.events cimport EventSource

cdef extern from "live_page.h" nogil:
    ctypedef enum LiveCounter:
        LIVE_LIMIT
        LIVE_IN_USE
        LIVE_REQUESTED_IN_USE
        LIVE_RESERVED
        LIVE_MAX_IN_USE
        LIVE_MAX_RESERVED
        LIVE_NUM_ALLOCS
        LIVE_NUM_FREES
        LIVE_NUM_RESERVES
        LIVE_NUM_EXTENSIONS
        LIVE_NUM_SHRINKAGES
        LIVE_MAX_ALLOC_SIZE
        LIVE_PAGES_MOVED
        LIVE_DRIVER_CALLS
        LIVE_SUSPENDED_BYTES
        LIVE_COUNTERS

# Fills in LIVE_COUNTERS words; False: it is closed. For a visitor of event sources, so the owner
# cannot go meanwhile.
cdef bint look_at(EventSource* source, uint64_t* counters) noexcept nogil

"""Where an arena's bytes come from: one struct of two functions and what they need.

A backing reserves and releases whole regions. It is called with the arena's grow lock held and
the arena lock not held, without the interpreter lock; it may call the driver and may block.
Addresses are multiples of 256. A refusal leaves nothing behind.
"""

from libc.stdint cimport uint64_t

from gpumem._driver cimport CUresult, Place

cdef enum BackingKind:
    BACKING_DEVICE = 0      # cuMemAlloc: a GPU's own memory, or ordinary memory on the host device
    BACKING_PINNED = 1      # cuMemHostAlloc: host memory that the device reads and writes
    BACKING_MANAGED = 2     # cuMemAllocManaged: migrates on demand

cdef struct Backing:
    CUresult (*reserve)(Backing* self, uint64_t size, uint64_t* address) noexcept nogil
    CUresult (*release)(Backing* self, uint64_t address, uint64_t size) noexcept nogil
    Place* place
    uint64_t calls          # driver calls made by this backing

cdef void backing_init(Backing* backing, BackingKind kind, Place* place) noexcept nogil
cdef const char* backing_call(BackingKind kind) noexcept nogil

"""Books of a resource whose every block is one call of its own Python methods.

What `MemoryResource` keeps for classes that users write: streams, counters, blocks. All of it is
under the interpreter lock; a block that is given back without that waits in _deferred.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport uint32_t, uint64_t

from gpumem._budget_core cimport BudgetCore
from gpumem._deferred cimport Deferred
from gpumem._driver cimport DriverDevice
from gpumem._lease cimport Lease
from gpumem._recorder cimport Tap

cdef enum:
    DEFAULT_SLOT = 0        # of the device's legacy default stream

cdef struct RawBlock:
    Deferred deferred       # first: a pointer to one is a pointer to the other
    PyObject* resource      # owned while a lease has the block; else NULL
    PyObject* books         # the resource's RawBooks; not owned
    uint64_t base           # what allocate_raw gave
    uint64_t size           # bytes that it was asked for
    uint64_t requested      # bytes that the user asked for
    uint32_t slot           # stream the block goes back on
    uint32_t generation     # of the process that took it
    RawBlock* older         # in the list of blocks that users have
    RawBlock* newer
    uint64_t number         # of its allocation, from 1

cdef class RawBooks:
    cdef DriverDevice place
    cdef object memory              # MemoryInfo
    cdef dict streams               # slot -> Stream; the resource's own
    cdef dict slots                 # (native handle, thread of handle 2) -> slot
    cdef dict threads               # slot -> the thread whose default stream it is
    cdef bint closed
    cdef BudgetCore* account        # that blocks are charged to, owned; NULL: none
    cdef bint counts_in_use         # a charge ends before deallocate_raw is called, not after
    cdef uint64_t live              # blocks handed out, or about to be
    cdef uint64_t in_use            # bytes
    cdef uint64_t requested
    cdef uint64_t max_in_use
    cdef uint64_t max_block
    cdef uint64_t num_allocs
    cdef uint64_t num_frees
    cdef uint64_t num_reserves
    cdef RawBlock* newest           # of the blocks that users have
    cdef Tap tap                    # where a recorder is attached

    # A block of `requested` bytes at a multiple of `alignment` (0: as the memory promises); raises
    # with nothing changed.
    cdef RawBlock* take(self, object resource, uint64_t requested, uint64_t alignment,
                        uint32_t slot, bint persistent) except NULL
    cdef int charge(self, uint64_t size, uint64_t requested, uint32_t slot) except -1
    cdef void uncharge(self, uint64_t size) noexcept
    # Of a block that is charged: gives the charge back if it fails.
    cdef int ask(self, object resource, RawBlock* block, object stream) except -1
    cdef void give(self, object resource, RawBlock* block) noexcept
    cdef int find_slot(self, object stream, uint32_t* slot) except -1
    cdef int reset(self, object stream) except -1
    cdef int require_open(self, object resource) except -1
    cdef int close(self, object resource) except -1
    cdef object stats(self)

# The address that the user sees.
cdef inline uint64_t raw_address(const RawBlock* block, uint64_t alignment) noexcept:
    return (block.base + alignment - 1) & ~(alignment - 1) if alignment else block.base

cdef RawBooks raw_books(DriverDevice place, object memory, dict streams, str name, object budget,
                        object count)
cdef Lease* raw_lease(object resource, RawBooks books, RawBlock* block,
                      uint32_t slot) except NULL
# Bytes, 0 for None; a power of two up to 2 MiB.
cdef uint64_t raw_alignment(object alignment) except? 1

"""Resources whose every block is one call to somebody else: the driver's pool, callbacks.

`DirectResource` is what users and Buffer see of them. `DirectCore` is what a block needs to go
back, also when the Python object is gone; the object and every block count a reference to it. A
resource says how a block is taken (`take`, which may raise) and how it is given back (`give`,
which may not, and is called with or without the interpreter lock).

`lock` guards counters and streams; under it there is no driver call, no Python object, no wait.
After a fork the child takes no lock of its parent: whoever takes one has asked `place_is_dead`.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t

from gpumem._budget_core cimport BudgetCore
from gpumem._buffer cimport Buffer, MemoryResource
from gpumem._driver cimport CUevent, CUstream, Place
from gpumem._lease cimport Uses
from gpumem._recorder cimport Tap
from gpumem._support.lock cimport Lock

cdef enum DirectStatus:
    DIRECT_OK = 0
    DIRECT_CLOSED = 1
    DIRECT_IN_USE = 2
    DIRECT_NO_METADATA = 3

cdef enum:
    DEFAULT_SLOT = 0        # of the resource's default stream

# Bytes and counts since the start, of one moment.
cdef struct DirectCounters:
    uint64_t live           # blocks handed out, or about to be
    uint64_t in_use
    uint64_t requested
    uint64_t waiting        # bytes that users gave back and the other side does not have yet
    uint64_t max_in_use
    uint64_t max_held       # in use and waiting
    uint64_t max_block
    uint64_t num_allocs
    uint64_t num_frees
    uint64_t num_reserves
    uint64_t num_shrinks
    uint64_t calls          # to the other side

cdef struct StreamSlot:
    CUstream handle
    int32_t thread          # whose default stream it is, for handle 2; else 0
    bint drained            # reset: its blocks go back on the default stream, and nobody finds it

cdef struct DirectCore:
    int32_t references      # atomic
    Place* place
    Lock lock
    bint closed
    uint64_t limit          # bytes that it may hold; 0: it sets none
    DirectCounters counters
    BudgetCore* account     # that blocks are charged to, owned; NULL: none
    bint counts_in_use      # a charge ends when the user gives the block back
    StreamSlot* streams     # slot -> stream
    uint32_t stream_count
    void (*give)(DirectBlock* block) noexcept nogil
    void (*end)(DirectCore* core) noexcept nogil    # the last reference is gone
    DirectBlock* newest     # of the blocks that users have
    Tap tap                 # where a recorder is attached
    PyObject* kept          # what blocks need of a resource object that is gone; owned
    DirectCore* next        # in the list of cores that are at their end

cdef struct DirectBlock:
    DirectCore* core        # counted
    uint64_t base           # address, as the other side knows it
    uint64_t size           # bytes that the other side was asked for
    uint64_t requested      # bytes that the user asked for
    uint64_t charged        # bytes that the account has for it
    uint32_t slot           # stream it goes back on
    bint persistent
    bint imported           # another process's block
    CUevent event           # behind the work it waits for; NULL: none
    Uses* uses              # streams recorded for it; NULL: none
    DirectBlock* next       # in a list of blocks that wait
    DirectBlock* older      # in the list of blocks that users have
    DirectBlock* newer
    uint64_t number         # of its allocation, from 1

cdef class DirectResource(MemoryResource):
    cdef uint64_t granule           # alignment that the other side promises, bytes
    cdef DirectCore* core           # NULL until it is initialised
    cdef object kept                # what blocks need of this object when it is gone

    cdef bint default_per_thread    # the default stream is each calling thread's own

    # Fills in block.base; raises, with nothing changed, if there is no memory.
    cdef int take(self, DirectBlock* block) except -1
    # The budget has refused: lets blocks go that users gave back.
    cdef int recover(self) except -1
    # What is left to do before a close: waits for blocks that users gave back.
    cdef int settle(self) except -1
    cdef int begin(self, DirectCore* core, memory, default_stream, name, budget,
                   count) except -1
    cdef Buffer hand_out(self, uint64_t requested, uint32_t slot, uint64_t alignment,
                         bint persistent)
    # The steps of it: count a block, or raise; charge it, or raise; make it the user's.
    cdef DirectBlock* claim(self, uint64_t requested, uint64_t size, uint32_t slot,
                            bint persistent) except NULL
    cdef int charge(self, DirectBlock* block) except -1
    cdef Buffer deliver(self, DirectBlock* block, uint64_t address)
    cdef int require_open(self) except -1
    cdef int require_own(self) except -1

cdef void direct_unclaim(DirectBlock* block) noexcept nogil
# The stream that a slot stands for now, and whether that is the default stream.
cdef CUstream direct_stream_at(DirectCore* core, uint32_t slot) noexcept nogil
cdef bint direct_is_default(DirectCore* core, uint32_t slot) noexcept nogil
# Called by `give`: the user has given the block back; the other side has it back.
cdef void direct_returned(DirectBlock* block) noexcept nogil
cdef void direct_gone(DirectBlock* block) noexcept nogil
# As direct_gone, for a block that counts no reference.
cdef void direct_forget(DirectBlock* block) noexcept nogil
cdef void direct_drop(DirectCore* core) noexcept nogil
cdef DirectCounters direct_counters(DirectCore* core) noexcept nogil
# The fields of Stats that are counted here; limit and reserved are the allocator's to say.
cdef dict counted_fields(const DirectCounters* now)
cdef void direct_count_call(DirectCore* core, uint64_t shrinks) noexcept nogil

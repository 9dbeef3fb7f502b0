"""The allocated blocks of a resource: counters, streams, charges, leases, events.

One `BlockLedger` serves every resource that allocates and frees block by block: a driver's pool, an
external allocator, a class that users derive from MemoryResource, an adaptor. The resource object
and every block count a reference to it, so that a view may be dropped after the object has ended.
Resources differ in `free`, which frees a block on any thread, with the interpreter lock or without,
and raises nothing.

The calls for one block are `ledger_claim`, `ledger_charge`, then `ledger_deliver` or
`ledger_cancel`; when its user frees it, `ledger_return`; when its memory is released to its origin,
`ledger_end`.

`lock` guards counters, streams and the list of blocks; while it is held there is no driver call, no
Python object, no wait. A fork's child takes no lock of its parent: check `context_is_dead` first.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t

from gpumem._native.budget cimport BudgetCore
from gpumem._native.driver cimport CUresult, CUstream, DeviceContext
from gpumem._support.events cimport EventSource
from gpumem._support.lease cimport Lease, Uses
from gpumem._support.lock cimport Lock
from gpumem._support.process cimport Deferred
from gpumem._support.retired cimport Retired

cdef enum LedgerStatus:
    LEDGER_OK = 0
    LEDGER_CLOSED = 1
    LEDGER_IN_USE = 2
    LEDGER_NO_METADATA = 3

cdef enum:
    DEFAULT_SLOT = 0        # of the resource's default stream

# Bytes and counts since the start, of one moment.
cdef struct LedgerCounters:
    uint64_t live           # blocks allocated, or about to be
    uint64_t in_use
    uint64_t requested
    uint64_t waiting        # bytes that users freed and that are not released to their origin
    uint64_t max_in_use
    uint64_t max_held       # in use and waiting
    uint64_t max_block
    uint64_t max_blocks     # allocated at a time
    uint64_t total_bytes    # requested so far
    uint64_t num_allocs
    uint64_t num_frees
    uint64_t num_reserves
    uint64_t num_shrinks
    uint64_t calls          # of the origin of the memory

cdef struct StreamSlot:
    CUstream handle
    int32_t thread          # that has it as its default stream (PER_THREAD_STREAM); else 0
    bint drained            # reset: its blocks are freed on the default stream; never found again
    bint vacant             # has no stream now
    uint32_t references     # of blocks that name it, and of calls that are about to

cdef struct BlockLedger:
    int32_t references      # atomic
    DeviceContext* context
    Lock lock
    bint closed
    bint is_users           # of a class that users wrote; its memory may have any owner
    bint default_per_thread     # the default stream is each calling thread's own
    bint counts_in_use      # a charge ends when the user frees the block, not at `ledger_end`
    uint64_t limit          # bytes that the resource may hold; 0: it sets none
    uint64_t granule        # alignment that every block has, bytes
    LedgerCounters counters
    BudgetCore* account     # that blocks are charged to, owned; NULL: none
    StreamSlot* streams     # slot -> stream; NULL: the upstream's
    uint32_t stream_count
    uint32_t vacant_slots
    uint32_t reclaim_at     # slots from which on a new one first vacates unused ones
    size_t block_size       # of the resource's own struct, which begins with a LedgerBlock
    void (*free)(LedgerBlock* block) noexcept nogil
    void (*end)(BlockLedger* ledger) noexcept nogil     # runs with the last reference; or NULL
    LedgerBlock* newest     # of the users' blocks
    EventSource events      # where a recorder is attached; not open for adaptors
    PyObject* kept          # objects that blocks need after the resource object ended; owned
    Retired retired         # in the list of ledgers without references

cdef struct LedgerBlock:
    Deferred deferred       # first; its link is also that of a resource's list of waiting blocks
    BlockLedger* ledger     # counted
    PyObject* owner         # the resource object, owned, where a free needs it; else NULL
    uint64_t base           # address, as its origin knows it
    uint64_t size           # bytes requested from its origin
    uint64_t requested      # bytes that the user requested
    uint64_t charged        # bytes that the account is charged for it
    uint32_t slot           # stream it is freed on; set by `ledger_move`
    bint persistent
    bint waits              # freed by its user, and counted as waiting
    Uses* uses              # streams recorded for it; NULL: none
    LedgerBlock* older      # in the list of the users' blocks
    LedgerBlock* newer
    uint64_t number         # of its allocation, from 1

# ---- life of a ledger ----------------------------------------------------------------------------

# Makes a ledger of zeros with these values and one reference; `size` is that of a struct that
# begins with a BlockLedger. NULL: out of host memory.
cdef BlockLedger* ledger_make(size_t size, size_t block_size,
                              void (*free_block)(LedgerBlock*) noexcept nogil,
                              void (*end)(BlockLedger*) noexcept nogil) noexcept nogil
# Creates its stream slots, with the default stream's; False: out of host memory.
cdef bint ledger_open_streams(BlockLedger* ledger, CUstream default_stream) noexcept nogil
# Lists it for recorders and snapshots from now on.
cdef void ledger_open_event_source(BlockLedger* ledger, const char* memory, const char* kind,
                                   const char* name) noexcept nogil
# The resource object ends: keeps objects that its blocks need. NULL: does nothing.
cdef void ledger_keep(BlockLedger* ledger, object kept) noexcept
# Drops one reference. NULL: does nothing.
cdef void ledger_drop(BlockLedger* ledger) noexcept nogil
# Frees the ledgers without references. Caller holds the interpreter lock.
cdef void ledgers_release_retired() noexcept
# LEDGER_IN_USE, with nothing changed: users have blocks, or a user's class is freeing one.
cdef LedgerStatus ledger_close(BlockLedger* ledger) noexcept nogil

# ---- the life of a block -------------------------------------------------------------------------

# Counts a block before it is allocated, so that the resource cannot be closed until then.
cdef LedgerStatus ledger_claim(BlockLedger* ledger, uint64_t requested, uint64_t size,
                               uint32_t slot, bint persistent, LedgerBlock** out) noexcept nogil
# False: the account refuses.
cdef bint ledger_charge(LedgerBlock* block) noexcept nogil
cdef void ledger_cancel(LedgerBlock* block) noexcept nogil
# The block was allocated; from here on its user owns it.
cdef void ledger_deliver(LedgerBlock* block) noexcept nogil
# A lease on a delivered block, which calls `free`; NULL: out of host memory.
cdef Lease* ledger_lease(LedgerBlock* block, uint64_t address, uint64_t nbytes) noexcept nogil
# Its user has freed it. `waits`: its memory is released to its origin later.
cdef void ledger_return(LedgerBlock* block, bint waits) noexcept nogil
# Makes a stream wait, on the device, for the streams recorded for a freed block. Caller does not
# hold the interpreter lock, because a stream's queue may be full.
cdef CUresult ledger_order_uses(LedgerBlock* block, CUstream stream) noexcept nogil
# Its memory was released to its origin. `counted`: the block counts a reference to its ledger.
cdef void ledger_end(LedgerBlock* block, bint counted) noexcept nogil

# ---- counters ------------------------------------------------------------------------------------

cdef LedgerCounters ledger_counters(BlockLedger* ledger) noexcept nogil
cdef void ledger_reset_peaks(BlockLedger* ledger) noexcept nogil
cdef void ledger_count_call(BlockLedger* ledger, uint64_t shrinks) noexcept nogil
# Reports an event of a block to a recorder; REC_FAILURE: it was refused.
cdef void ledger_note(LedgerBlock* block, uint32_t kind) noexcept nogil
# Copies the users' blocks, the newest first, `block_size` bytes each, which the caller frees. NULL:
# out of host memory.
cdef char* ledger_copy_blocks(BlockLedger* ledger, uint64_t* count) noexcept nogil
# The fields of Stats that are counted here.
cdef dict counted_fields(const LedgerCounters* now)

# ---- streams -------------------------------------------------------------------------------------

# Finds a stream's slot or makes one, and retains it; each thread's default stream is its own.
# `vacated`: slots that no block names are vacant now, or this stream's, and the objects that were
# kept for them are not needed. Caller holds the interpreter lock. False: out of host memory.
cdef bint ledger_find_stream(BlockLedger* ledger, CUstream handle, uint32_t* slot,
                             bint* vacated) noexcept nogil
cdef void ledger_retain_slot(BlockLedger* ledger, uint32_t slot) noexcept nogil
cdef void ledger_drop_slot(BlockLedger* ledger, uint32_t slot) noexcept nogil
cdef bint ledger_is_vacant(BlockLedger* ledger, uint32_t slot) noexcept nogil
# The block is freed on another stream from now on.
cdef void ledger_move(LedgerBlock* block, uint32_t slot) noexcept nogil
cdef void ledger_drain(BlockLedger* ledger, uint32_t slot) noexcept nogil
# The stream that a slot stands for now, and whether that is the default stream.
cdef CUstream ledger_stream(BlockLedger* ledger, uint32_t slot) noexcept nogil
cdef bint ledger_is_default(BlockLedger* ledger, uint32_t slot) noexcept nogil

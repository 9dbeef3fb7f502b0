"""The base of all resources, which allocate buffers, and its methods for a ledger of blocks."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._budget cimport Budget
from gpumem._buffer.buffer cimport Buffer, ResourceBase
from gpumem._buffer.ledger cimport BlockLedger, LedgerBlock
from gpumem._native.driver cimport CUstream

cdef class MemoryResource(ResourceBase):
    cdef readonly str name
    cdef readonly Budget budget         # that it charges; or None
    cdef uint64_t alignment             # of every block of `allocate`; 0: as blocks are allocated
    cdef object __weakref__

    # Does the same as `allocate` without a stream, for C callers.
    cdef Buffer obtain(self, uint64_t nbytes)

    # ---- with a ledger -----------------------------------------------------------------------
    # Sets block.base; raises, with nothing changed, if there is no memory.
    cdef int take_block(self, LedgerBlock* block) except -1
    # The account refuses that many bytes: reclaims blocks that users have freed.
    cdef int make_room(self, uint64_t nbytes) except -1
    # Runs after it was closed: waits for blocks that users have freed.
    cdef int finish_close(self) except -1
    # Raises ClosedError if it is closed, or belongs to the parent of a fork.
    cdef int require_open(self) except -1

# Ends a buffer's claim on the owner of borrowed memory: on any thread, with the interpreter lock or
# without.
ctypedef void (*ReleaseOwner)(void* owner) noexcept nogil

# Base of resources of buffers over memory with another owner; they allocate nothing. The handle of
# a buffer is a struct that keeps the owner, which `release` ends.
cdef class BorrowedMemory(MemoryResource):
    cdef CUstream own           # of every buffer
    cdef ReleaseOwner release

    # Without a `stream` the memory belongs to none if it `may_have_none`, else to the legacy one.
    cdef int borrow(self, object memory, str name, object stream, bint may_have_none,
                    ReleaseOwner release) except -1
    cdef CUstream named(self, object stream) except? NULL

cdef enum ResourceHook:
    HOOK_OF_TOP             # the page of gpumem top
    HOOK_OF_RUN             # gpumem run --report
    RESOURCE_HOOKS

# Sets a function that is called whenever a resource is made; NULL: none.
cdef void set_resource_hook(ResourceHook hook, int (*function)() except -1) noexcept nogil

cdef int resource_init(MemoryResource resource, object memory, object name) except -1
# Gives an adaptor the properties of its upstream.
cdef int resource_adapt(MemoryResource resource, MemoryResource upstream, object name) except -1
# Takes a new ledger over (NULL: MemoryError). After resource_init.
cdef int resource_begin(MemoryResource resource, BlockLedger* ledger, str kind,
                        object default_stream, object budget, object count) except -1
# Counts a block of an open resource; charges it, with pressure callbacks if refused; makes it the
# user's. The first two raise with nothing changed.
cdef LedgerBlock* resource_claim(MemoryResource resource, uint64_t requested, uint64_t size,
                                 uint32_t slot, bint persistent) except NULL
cdef int resource_charge(MemoryResource resource, LedgerBlock* block) except -1
cdef Buffer resource_deliver(MemoryResource resource, LedgerBlock* block, uint64_t address)

# Bytes that are requested from `resource`, 0 or more; None: of a limit. A number above 63 bits is
# refused: by the resource's OutOfMemoryError, of a limit by ValueError.
cdef uint64_t size_of(object nbytes, object resource) except? <uint64_t>-1
# Bytes, a power of two up to 2 MiB.
cdef uint64_t alignment_of(object alignment) except? 0
# The alignment of a MemoryInfo, for a resource that aligns its blocks; ConfigError above 2 MiB.
cdef uint64_t alignment_in(object memory) except? 0

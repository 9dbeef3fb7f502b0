"""An existing allocator, called by callbacks, as a resource."""

from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t

from gpumem._buffer cimport BlockLedger, LedgerBlock, MemoryResource
from gpumem._native.driver cimport CUevent

ctypedef void* (*ExternalAlloc)(size_t) noexcept nogil
ctypedef void (*ExternalFree)(void*) noexcept nogil
ctypedef void (*ExternalEmptyCache)() noexcept nogil

# One of each pair is set: the C function, or the Python callable. The callable is borrowed from the
# resource object, which is kept by every block that is freed by a callable.
cdef struct ExternalCore:
    BlockLedger ledger          # first: a pointer to one is a pointer to the other
    uint64_t alignment          # bytes, that every address is a multiple of
    # Every block that is not freed by a callback yet, a treap by address: none overlaps another.
    # `ledger.lock` guards it.
    ExternalBlock* held
    ExternalFree free
    PyObject* free_object
    ExternalEmptyCache empty_cache
    PyObject* empty_cache_object

cdef struct ExternalBlock:
    LedgerBlock block           # first
    CUevent event               # recorded after the work it waits for; NULL: none
    ExternalBlock* lower        # in `held`: its children
    ExternalBlock* higher

cdef class ExternalAllocator(MemoryResource):
    cdef ExternalAlloc alloc
    cdef readonly object callbacks      # (alloc, free, empty_cache) as they were given

    cdef uint64_t call_alloc(self, uint64_t nbytes) except? 0
    cdef int hold(self, LedgerBlock* block) except -1
    cdef bint call_empty_cache(self) except -1

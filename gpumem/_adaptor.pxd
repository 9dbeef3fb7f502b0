"""What every adaptor does: hand out an upstream's blocks under its own name, and count them.

A block of an adaptor holds the upstream's Buffer; once views share it, the upstream's lease
instead, so that the last view may be dropped on a thread without the interpreter. What is counted
changes then and there; what needs the interpreter (a sink, a stack, the reference to the adaptor)
follows in _deferred.

`lock` guards the counters and the list of live blocks; under it no driver call, no Python object,
no wait.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t

from gpumem._budget_core cimport BudgetCore
from gpumem._buffer cimport Buffer, MemoryResource
from gpumem._deferred cimport Deferred
from gpumem._driver cimport Place
from gpumem._lease cimport Lease
from gpumem._support.lock cimport Lock

# Bytes as they were asked for.
cdef struct Counts:
    uint64_t current_bytes
    uint64_t current_blocks
    uint64_t peak_bytes
    uint64_t peak_blocks
    uint64_t total_bytes
    uint64_t total_blocks

# The part of an Adaptor that threads without the interpreter touch.
cdef struct Ledger:
    Lock lock
    Place* place
    uint64_t limit              # bytes; NO_LIMIT
    BudgetCore* account         # that bytes are charged to, owned; NULL: none
    Counts counts
    AdaptedBlock* newest        # live blocks, linked both ways

cdef struct AdaptedBlock:
    Deferred deferred           # first: a pointer to one is a pointer to the other
    Ledger* ledger              # of `adaptor`
    PyObject* adaptor           # owned while a lease has the block; else NULL
    PyObject* inner             # the upstream's Buffer, owned; NULL once leased
    PyObject* home              # the resource whose numbers name its streams; not owned
    Lease* lease                # the upstream's, once leased
    PyObject* note              # kept with the block, owned; NULL: none
    uint64_t address
    uint64_t asked              # bytes
    uint64_t stream             # handle it went back on
    int64_t time                # of the end: nanoseconds since 1970
    uint64_t thread             # of the end
    AdaptedBlock* older
    AdaptedBlock* newer

cdef class Adaptor(MemoryResource):
    cdef readonly tuple upstreams
    cdef Ledger ledger
    cdef bint is_closed
    cdef bint tells             # _taken_back wants to hear of every end

    cdef Buffer hand_out(self, object nbytes, object stream, dict options, bint persistent)

"""Base of adaptors: allocates an upstream's blocks under its own name, and counts them.

A block of an adaptor owns the upstream's Buffer; once views share it, the upstream's lease
instead, so that the last view may be dropped on a thread without the interpreter. Counters change
at once; work that needs the interpreter (a sink, a stack, the reference to the adaptor) follows in
_support/process. Its ledger has no streams: slots are the upstream's.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer, LedgerBlock, MemoryResource
from gpumem._support.lease cimport Lease, Uses

cdef struct AdaptedBlock:
    LedgerBlock block           # first; its owner is the adaptor, once a lease has the block
    PyObject* inner             # the upstream's Buffer, owned; NULL once leased
    PyObject* home              # the resource of its stream slots; not owned
    PyObject* upstream          # the resource that it came from; not owned
    Lease* lease                # the upstream's, once leased
    Uses** uses                 # once leased: where streams recorded for it are noted
    PyObject* note              # of `_note`, owned; NULL: none
    uint64_t stream             # handle it was freed on
    int64_t time                # of the free: nanoseconds since 1970
    uint64_t thread             # of the free

cdef class Adaptor(MemoryResource):
    cdef readonly tuple upstreams
    cdef bint tells             # _on_free is called for every block

    cdef Buffer allocate_from(self, object nbytes, object stream, dict options, bint persistent)

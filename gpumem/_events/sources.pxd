"""The event source of a resource, for recordings and snapshots."""

from gpumem._arena cimport Arena, GraphPool
from gpumem._buffer cimport MemoryResource
from gpumem._native.arena.api cimport arena_events
from gpumem._support.events cimport EventSource


# NULL: it was never initialised, or is not a resource of gpumem's.
cdef inline EventSource* find_source(object resource) noexcept:
    if isinstance(resource, GraphPool) and (<GraphPool>resource).core != NULL:
        return arena_events((<GraphPool>resource).core)
    if isinstance(resource, Arena):
        return arena_events((<Arena>resource).core)
    if isinstance(resource, MemoryResource) and (<MemoryResource>resource).ledger != NULL:
        return &(<MemoryResource>resource).ledger.events
    return NULL


cdef inline EventSource* source_of(object resource) except NULL:
    cdef EventSource* source = find_source(resource)
    if source != NULL:
        return source
    raise TypeError(f"{resource!r} is not a resource that allocates blocks, or was never "
                    "initialised")

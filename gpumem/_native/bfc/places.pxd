"""Blocks at places that a plan has chosen, in one region of a table.

All chunks of the region begin at *edges*: the places at which planned blocks begin or end, known
beforehand. `starts` has the chunk that began at an edge last. A merge does not update it: an entry
holds only if its chunk still begins there, and one that does not is cleared when a search meets it.
So the chunk that covers a place is found from the edge below by looking back over the edges at
which chunks begin, in words of 64.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.bfc.table cimport Bfc

# The caller locks, as for the table.
cdef struct Places:
    uint64_t base           # address of the region
    uint32_t edge_count
    uint64_t* edges         # offsets in it, rising; the first is 0
    uint32_t* starts        # edge -> chunk that began there last
    uint64_t* begun         # a bit for each edge: `starts` has an entry

# False: out of host memory, and nothing is held. `edges` are copied; `first` begins at `base`.
cdef bint places_init(Places* places, uint64_t base, const uint64_t* edges, uint32_t edge_count,
                      uint32_t first) noexcept nogil
cdef void places_free(Places* places) noexcept nogil

# The free chunk that covers the bytes between two edges; NIL if there is none.
cdef uint32_t places_find(Places* places, const Bfc* table, uint32_t begin,
                          uint32_t end) noexcept nogil
# Takes those bytes out of that chunk and marks them used for `stream_slot`; NIL: the array of
# chunks could not grow, nothing changed.
cdef uint32_t places_allocate(Places* places, Bfc* table, uint32_t index, uint32_t begin,
                              uint32_t end, uint64_t requested,
                              uint32_t stream_slot) noexcept nogil

# The free chunk that covers bytes from an address on; NIL: none does. A loop over the chunks of a
# region.
cdef uint32_t bfc_free_around(const Bfc* table, uint64_t address, uint64_t size) noexcept nogil
# Without a plan: exactly the bytes from an address on, whatever stream they were freed on; NIL: a
# part of them is in use or in no region, or, with *status set, the array of chunks could not grow.
# A loop over the chunks of a region.
cdef uint32_t bfc_allocate_range(Bfc* table, uint64_t address, uint64_t size, uint64_t requested,
                                 uint32_t stream_slot, int* status) noexcept nogil

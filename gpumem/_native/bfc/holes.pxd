"""Address ranges with holes: the chunk table of pages that move.

A *hole* is address space that holds no memory for the table: never mapped, or mapped by a page
that counts elsewhere. Holes are chunks like others, so that a range is covered without gap. They
hang in one list, merge with each other only and count nothing: `reserved` of a table is the sum
of all chunks that are not holes.

All of it belongs to the slow path. A function that may grow the array of chunks does that first;
if the host has no memory, it returns NIL, and nothing has changed.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.bfc.table cimport Bfc

# Adds a region that is one hole.
cdef int holes_add_range(Bfc* table, uint64_t address, uint64_t size,
                         uint32_t* region) noexcept nogil
# Turns [begin, end) of a free chunk into a hole; all else of it stays free. Returns the hole.
cdef uint32_t holes_carve(Bfc* table, uint32_t index, uint64_t begin, uint64_t end) noexcept nogil
# Turns [begin, end) of a hole into a free chunk of `stream_slot`; all else stays hole. Returns the
# chunk after merging.
cdef uint32_t holes_fill(Bfc* table, uint32_t index, uint64_t begin, uint64_t end,
                         uint32_t stream_slot, uint64_t epoch) noexcept nogil
# Makes one used chunk of [begin, end), which neighbouring free chunks and holes cover from
# `index` on. The caller provides memory for its holes.
cdef uint32_t holes_allocate(Bfc* table, uint32_t index, uint64_t begin, uint64_t end,
                             uint64_t requested, uint32_t stream_slot) noexcept nogil
# Allocates a block of free chunks side by side that the stream may use, where no single one is
# large enough: a mark that spreads no further than its own size leaves such boundaries. NIL: there
# are none, or, with *status set, the array of chunks could not grow. It loops over all chunks.
cdef uint32_t bfc_allocate_across(Bfc* table, uint64_t size, uint64_t requested,
                                  uint32_t stream_slot, int* status) noexcept nogil
# Frees the bytes of a used chunk above `size` as a chunk of its stream slot.
cdef bint holes_trim(Bfc* table, uint32_t index, uint64_t size, uint64_t epoch) noexcept nogil
# Undoes an allocation that failed: the used chunk becomes one hole.
cdef uint32_t holes_undo_allocate(Bfc* table, uint32_t index) noexcept nogil

# The free chunk that covers bytes from an address on; NIL: none does. It loops over the chunks of a
# region.
cdef uint32_t bfc_free_around(const Bfc* table, uint64_t address, uint64_t size) noexcept nogil
# Allocates exactly the bytes from an address on, freed on any stream. NIL: a part of them is in use
# or in no region, or, with *status set, the array of chunks could not grow. It loops
# over the chunks of a region.
cdef uint32_t bfc_allocate_range(Bfc* table, uint64_t address, uint64_t size, uint64_t requested,
                                 uint32_t stream_slot, int* status) noexcept nogil

"""An arena's metadata as it is at one moment, copied while no thread changes it.

Only the copy is made with the locks: its memory is made and touched before, and readers use the
copy alone.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, ArenaStats
from gpumem._native.bfc cimport Chunk, Region

# A chunk, and the number of its region.
cdef struct BlockCopy:
    Chunk chunk
    uint32_t region

cdef struct TableCopy:
    Chunk* chunks           # slots as in the table, unused ones too
    uint32_t count
    Region* regions
    uint32_t region_count

cdef struct PageCopy:
    uint64_t address
    uint64_t nbytes

cdef struct ArenaCopy:
    TableCopy tables[2]     # `table`, `small`
    PageCopy* pages         # where physical memory counts: of blocks, none while they sleep
    uint32_t page_count
    PageCopy* span_pages    # of virtual tensors: those in use
    uint32_t span_page_count
    uint64_t* streams       # handle by slot
    uint32_t stream_count
    ArenaStats stats        # of that moment, with counts that caches had not published
    uint64_t reserved       # with what virtual tensors hold, without what sleeps
    uint64_t persistent_free    # bytes of pages that only persistent blocks may have
    uint64_t limit
    uint32_t state          # ArenaState
    uint64_t held           # ns for which other threads could not allocate here

# False: out of host memory, and nothing to free; else arena_copy_free ends it.
cdef bint arena_copy(ArenaCore* arena, ArenaCopy* copy) noexcept nogil
cdef void arena_copy_free(ArenaCopy* copy) noexcept nogil

# What statistics ask of one arena, without a copy; of `table` and of `small`.
cdef struct ArenaFigures:
    uint64_t reserved[2]        # bytes
    uint64_t segments[2]        # regions or pages, of blocks without one of their own
    uint64_t pending[2]         # blocks freed that other streams still use
    uint64_t pending_bytes[2]
    uint64_t idle[2]            # free pieces of what is in use
    uint64_t idle_bytes[2]

# Adds those of an arena. A loop over its stream slots, its regions and its pending frees.
cdef void arena_add_figures(ArenaCore* arena, ArenaFigures* figures) noexcept nogil

cdef void chunk_copy(const Chunk* chunk, Chunk* copy) noexcept nogil

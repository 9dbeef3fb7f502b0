"""Growing an arena: with the grow lock held, the arena lock not, unless said."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block
from gpumem._native.bfc cimport Bfc
from gpumem._native.driver cimport CUresult
from gpumem._native.pages cimport MappedPage

# A new region, or pages, and the block from them in one step. `own_region`: a region of exactly
# this block; `flags` are AllocateFlags.
cdef int grow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, bint own_region,
              uint32_t flags, Block* block) noexcept nogil
# With the arena lock: a block at a place as low as swaps of idle pages give; see bfc_allocate.
cdef uint32_t allocate_lower(ArenaCore* arena, Bfc* table, uint64_t nbytes, uint32_t stream_slot,
                             int* status) noexcept nogil
# May an allocation that is served by the driver give back what the driver takes back only when the
# device is idle? Only where the settings let it wait.
cdef bint miss_may_wait(ArenaCore* arena, uint32_t flags) noexcept nogil
# A block's region counts as made for transports from here on, and goes back as those do.
# CUDA_ERROR_OUT_OF_MEMORY: the host has no memory for that.
cdef CUresult list_for_transport(ArenaCore* arena, uint64_t address) noexcept nogil
# Lets a further device touch what the driver maps for the arena, now and later. A refusal of
# cuMemSetAccess leaves the list of devices as it was.
cdef CUresult arena_add_peer(ArenaCore* arena, int device) noexcept nogil
# The page that an address of a live block lies in, which stays while the block lives and its tag is
# awake; takes the grow lock. False: the memory is not pages.
cdef bint arena_page_around(ArenaCore* arena, uint64_t address, MappedPage* found) noexcept nogil
# Is it worth giving idle memory back and trying again?
cdef bint shrink_may_help(const ArenaCore* arena, uint64_t nbytes, int status) noexcept nogil
# Is memory out, so that others' memory, once it is free, may serve the block?
cdef bint memory_is_out(const ArenaCore* arena, uint64_t nbytes, int status) noexcept nogil
# Of a paged arena: makes pages for so many bytes more, free for every stream.
cdef int prepare_pages(ArenaCore* arena, uint64_t nbytes) noexcept nogil

"""Graph capture: memory that a graph may write whenever it is launched.

A *graph pool* is an arena of its own, a child of the one whose stream is captured: a slot for each
captured stream and no reuse between them, so that it neither records nor polls events, and memory
freed inside a capture stays in the pool. `max_mem` of the parent bounds both together. Beside a
paged arena it has pages, which move as the arena's do but keep every view: the graph's addresses
stay valid (see _native/pages/types.pxd). Moves have no budget of time, since a capture happens
once. Otherwise, and where work outside of captures uses it too, it has plain regions.

It sleeps with its parent, or with the arena of a tag, where that can sleep: regions are physical
handles then. Blocks with another tag come from a further pool, which the first one has. Each graph
that retains it counts as a reference, dropped by the driver with the graph and its last instance.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block
from gpumem._native.backing cimport Backing
from gpumem._native.driver cimport CUgraph, CUresult

# A graph pool for blocks with the tag of an arena, with its reference; NULL: out of host memory, or
# the arena's memory is not plain memory of the device and no other backing is given. `part_of`: the
# pool that it belongs to; NULL: it is one by itself. `splits`: else a block is all of the region or
# block that it is put in. `captured`: only captures use it.
cdef ArenaCore* pool_create(ArenaCore* owner, ArenaCore* part_of, const Backing* given,
                            bint splits, bint captured) noexcept nogil
# Makes a fresh arena, without a region, such a pool. No lock is held, nor the interpreter's.
cdef void pool_adopt(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil
# What of a pool serves the tag that the calling thread has open; made at the first use, and kept by
# the pool. NULL: out of host memory.
cdef ArenaCore* pool_for_tag(ArenaCore* pool) noexcept nogil
# Before a capture, none being under way: what was freed earlier, and has no unfinished work behind
# it, is free for all its streams.
cdef void pool_begin(ArenaCore* pool) noexcept nogil
# No graph will be launched any more: what was freed can go back to the driver, block by block.
cdef void pool_end(ArenaCore* pool) noexcept nogil
# Is a part of it asleep, so that its graphs would touch addresses without memory?
cdef bint pool_sleeps(ArenaCore* pool) noexcept nogil
# The pool lives as long as the graph and what was instantiated of it. Legal while it is captured.
cdef CUresult pool_retain_with(ArenaCore* pool, CUgraph graph) noexcept nogil
# Allocates exactly these bytes, where an earlier block of a graph pool was; the work of its streams
# is done. ARENA_STALE: they are not free.
cdef int arena_allocate_range(ArenaCore* arena, uint64_t address, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, Block* block) noexcept nogil

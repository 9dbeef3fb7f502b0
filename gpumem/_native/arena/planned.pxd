"""An arena of one region that hands its blocks out at planned places; see bfc/places.

Frees, streams and reuse follow the arena's rules, as for any block. A place is handed out only
where a search could have found it: no block there is live or pending free, and every free there was
on the taker's stream, or has completed.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block
from gpumem._native.bfc cimport Places

# Of a fresh arena whose one region is idle. False: out of host memory.
cdef bint arena_places_init(ArenaCore* arena, Places* places, const uint64_t* edges,
                            uint32_t edge_count) noexcept nogil
# The fast path alone: no driver call, no wait. On ARENA_MISS arena_place_slow polls other streams
# or waits behind them on the device; ARENA_MISS from that: the place is not free now.
cdef int arena_place_fast(ArenaCore* arena, Places* places, uint32_t begin, uint32_t end,
                          uint64_t requested, uint32_t stream_slot, Block* block) noexcept nogil
# Exactly these bytes, where an earlier block was, of a graph pool; its streams' work is done: see
# complete_streams. ARENA_STALE: they are not free.
cdef int arena_allocate_range(ArenaCore* arena, uint64_t address, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, Block* block) noexcept nogil
cdef int arena_place_slow(ArenaCore* arena, Places* places, uint32_t begin, uint32_t end,
                          uint64_t requested, uint32_t stream_slot, Block* block) noexcept nogil

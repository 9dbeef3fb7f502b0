"""GraphPool: the memory of captured graphs, as users see it."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena.arena cimport Arena
from gpumem._buffer cimport Buffer
from gpumem._native.arena.api cimport ArenaCore
from gpumem._native.driver cimport CUgraph

cdef class GraphPool:
    cdef readonly Arena arena           # that it belongs to
    cdef Arena inner                    # the arena that holds its memory
    cdef dict parts                     # arena of a tag -> the arena for blocks of that tag
    cdef ArenaCore* core                # of `inner`
    cdef dict serving                   # slot of `arena` -> its stream, kept alive
    cdef uint32_t contexts              # open contexts
    cdef uint64_t capture               # the capture that the arena opened it for; 0: by the user
    cdef object __weakref__

    # The arena that serves allocations under the tag of `tagged`; None: no tag is open.
    cdef Arena part(self, Arena tagged)
    cdef list members(self)

# Which pools serve which streams of one arena.
cdef class Captures:
    cdef dict served                    # slot -> GraphPool
    cdef object pools                   # every live GraphPool of the arena

    # The pool that serves a stream now; None: the arena itself. `capturing`: the driver reports
    # that the stream captures, so a pool must serve it.
    cdef GraphPool pool_of(self, Arena arena, uint32_t slot, bint capturing)
    cdef GraphPool join(self, Arena arena, uint32_t slot, uint64_t capture, uint64_t graph)
    cdef int serve(self, Arena arena, uint32_t slot, object stream, GraphPool pool) except -1
    # Ends serving a slot; None: all slots of the pool. It allocates nothing.
    cdef int end(self, GraphPool pool, object slot) except -1
    cdef int end_slot(self, GraphPool pool, object slot) except -1
    # Ends a pool, or all pools, that the arena opened for a capture that is over; did any end?
    cdef bint end_if_over(self, GraphPool pool) except -1

# Whether a buffer's memory stays a graph's when the buffer has ended.
cdef bint is_in_graph_pool(Buffer buffer) noexcept
# The driver's number of the capture that a stream is in; 0: none.
cdef uint64_t capture_on(const ArenaCore* core, uint32_t slot, CUgraph* graph) noexcept

# `Arena.capture`.
cdef object capture_into(Arena arena, object stream, object pool)
# The pool that serves the slot's stream; None: the arena itself.
cdef GraphPool pool_for(Arena arena, uint32_t slot, bint capturing)
# Allocates in a pool, for a stream of its arena.
cdef Buffer take_captured(Arena arena, GraphPool pool, object nbytes, uint32_t slot,
                          object alignment)
# Arenas of an arena's tags and of its open pools.
cdef list children_of(Arena arena)
# Ends the pools that the arena opened for a capture that is over; did any end?
cdef bint end_finished_captures(Arena arena) except -1
# Resets a stream, which has this slot in the arena, in the pools that do not serve it.
cdef int reset_pools(Arena arena, uint32_t slot, object stream) except -1
# Raises InUseError if a pool of the arena is in use.
cdef int require_idle_pools(Arena arena) except -1

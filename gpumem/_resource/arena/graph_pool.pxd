"""GraphPool: the memory of captured graphs, as users see it."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._buffer cimport Buffer
from gpumem._native.arena cimport ArenaCore
from gpumem._native.driver cimport CUgraph
from gpumem._resource.arena.settings cimport ArenaBase

cdef class GraphPool:
    cdef readonly ArenaBase arena           # that it belongs to
    cdef ArenaBase inner                    # the arena that holds its memory
    cdef dict parts                         # and those for tags: arena of a tag -> arena
    cdef ArenaCore* core                    # of `inner`
    cdef dict serving                       # slot of `arena` -> its stream, kept alive
    cdef uint32_t contexts                  # that are open
    cdef uint64_t capture                   # that it was opened for by itself; 0: by the user
    cdef object __weakref__

    # What serves allocations under the tag of an arena; None: none is open.
    cdef ArenaBase part(self, ArenaBase tagged)
    cdef list members(self)

# Which pools serve which streams of one arena.
cdef class Captures:
    cdef dict served                        # slot -> GraphPool
    cdef object pools                       # every GraphPool of it that lives, for its end

    # The pool that serves a stream now; None: the arena itself. `capturing`: its driver says that
    # it captures, so there must be one.
    cdef GraphPool pool_of(self, ArenaBase arena, uint32_t slot,
                           bint capturing)
    cdef GraphPool join(self, ArenaBase arena, uint32_t slot,
                        uint64_t capture, uint64_t graph)
    cdef int serve(self, ArenaBase arena, uint32_t slot, object stream,
                   GraphPool pool) except -1
    # The pool serves a slot no longer; None: none at all.
    cdef int end(self, GraphPool pool, object slot) except -1
    # Ends a pool, or all, that were opened by themselves for a capture that is over; did any?
    cdef bint end_if_over(self, GraphPool pool) except -1
    cdef bint end_over(self) except -1
    cdef int close(self) except -1

# Whether a buffer's memory stays a graph's when the buffer has ended.
cdef bint is_in_graph_pool(Buffer buffer) noexcept
cdef GraphPool make_pool(ArenaBase arena, ArenaBase inner)
cdef uint64_t capture_on(const ArenaCore* core, uint32_t slot, CUgraph* graph) noexcept

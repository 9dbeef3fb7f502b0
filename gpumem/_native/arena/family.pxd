"""References of arenas, and their children: arenas of tags, and graph pools.

Blocks of different tags share no page, so that the pages of one can sleep alone. So each tag has an
arena of its own, a child as a graph pool is: the limit and the budget are its parent's, and idle
memory of one is released where another needs it. Python's context has the open tags
(`_support/contexts`); while any context has one of an arena, allocations of that arena leave the
fast path to ask which. The blocks of a graph pool have tags too: it has a pool for each, and each
sleeps with the arena of its tag.
"""

from libc.stdint cimport int32_t, uint32_t

from gpumem._native.arena.types cimport ArenaCore, is_graph_pool, root_of
from gpumem._native.arena.values cimport ArenaFront
from gpumem._support.atomics cimport published_pointer
from gpumem._support.retired cimport Retired

cdef void arena_retain(ArenaCore* arena) noexcept nogil
# Retains an arena that may be at its end, while it cannot be freed; False: it has ended.
cdef bint arena_retain_live(ArenaCore* arena) noexcept nogil
# Drops a reference. The last one only retires the arena, because a finalizer must not block.
cdef void arena_drop(ArenaCore* arena) noexcept nogil
cdef void arena_retire(ArenaCore* arena) noexcept nogil
cdef Retired* arenas_take_retired() noexcept nogil

cdef struct Found:
    ArenaCore** arenas          # each retained
    uint32_t count
    uint32_t room
    bint failed

# Finds all arenas of the process, with tags and graph pools. `failed`: for some there is no memory.
# The caller drops each, and frees the list.
cdef void arenas_find(Found* found) noexcept nogil

# Counts an open tag of the arena, or subtracts one.
cdef void tag_count(ArenaCore* arena, int32_t by) noexcept nogil
# Returns the arena that serves the calling context's allocations of `arena`; NULL: `arena` itself.
cdef ArenaCore* tag_now(const ArenaCore* arena) noexcept nogil

# Makes a fresh arena a tag's arena, a child of `arena`.
cdef void tag_adopt(ArenaCore* tagged, ArenaCore* arena) noexcept nogil
# Makes a fresh arena a graph pool of the parent of `owner`, for blocks with the tag of `owner`.
# `part_of`: the pool that has it, which refers to it from here on; NULL: it is that pool.
cdef void pool_join(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil
# Removes a child that ends from its parent, which may end then.
cdef void child_leave(ArenaCore* arena) noexcept nogil
# Returns whether other arenas share its limit: its tags, or, of a graph pool, its parent.
cdef inline bint shares_limit(const ArenaCore* arena) noexcept nogil:
    return is_graph_pool(arena) or published_pointer(&root_of(arena).tagged) != NULL
# Returns the arena after `before` in the sequence of the parent and its tags; NULL begins and ends
# it. Each is retained until it is passed in as `before`.
cdef ArenaCore* tag_next(ArenaCore* arena, ArenaCore* before) noexcept nogil
# The same of graph pools: those that sleep with an arena; all that share its limit; those that a
# pool has for tags.
cdef ArenaCore* pool_next(ArenaCore* owner, ArenaCore* before) noexcept nogil
cdef ArenaCore* any_pool_next(ArenaCore* arena, ArenaCore* before) noexcept nogil
cdef ArenaCore* part_next(ArenaCore* pool, ArenaCore* before) noexcept nogil

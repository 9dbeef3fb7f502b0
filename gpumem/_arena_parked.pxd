"""Blocks that were freed while other streams may still use them.

At the free, `Uses` of the block becomes a list of (stream, running epoch) and the block is parked:
neither in use nor free. An epoch counts as done when an event behind it has completed or its stream
was reset. When all are done the block becomes free in the slot of the stream it was freed on.

Every function with the arena lock held, but for `let_go`.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore
from gpumem._bfc cimport Bfc
from gpumem._lease cimport Uses

# Parks a live block that is freed on `stream` and takes `uses` over. False, with `uses` let go, if
# there is nothing to wait for or the block is a stranger: it is to be freed as any other.
cdef bint free_later(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                     Uses* uses) noexcept nogil
# Ends recorded uses of a block that nothing waits for any more. Needs no lock.
cdef void uses_let_go(ArenaCore* arena, Uses* uses) noexcept nogil
# Frees what waits for nothing any more; was there anything?
cdef bint free_completed(ArenaCore* arena) noexcept nogil
# Frees everything, done or not: no block is handed out any more.
cdef void free_all_pending(ArenaCore* arena) noexcept nogil
# The smallest parked block of the table that holds `size` bytes; NULL: none.
cdef Uses* pending_free_best(ArenaCore* arena, const Bfc* table, uint64_t size) noexcept nogil
# Is it still parked? Asked after the lock was given up.
cdef bint is_pending_free(const ArenaCore* arena, const Uses* uses, uint64_t handle) noexcept nogil
# Frees it for a stream that waits on the device for everything that uses it.
cdef void free_pending_behind(ArenaCore* arena, Uses* uses, uint32_t taker) noexcept nogil

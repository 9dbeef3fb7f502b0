"""Sleep of one arena: its memory is released, its live bytes are stored, its addresses stay.

A sleep has four steps: nothing is allocated any more; all work on the device ends; idle pages are
released; the handles are released after the copies of the live blocks. Each page keeps its place
in the metadata. A wake makes each page again, at its place, and restores the bytes that are still
live. It neither copies a block that was freed during the sleep nor makes a page without live bytes.

Virtual tensors are a part of it, with the pages of committed rows. Its graph pools sleep after it,
and wake before it, each the same way: a region of a pool is one handle. So its graphs stay valid.

A failure undoes: a sleep that fails leaves the arena awake, a wake that fails leaves it asleep, to
be tried again. Where the undoing fails too, the arena is half asleep, and a wake completes it.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore
from gpumem._native.arena.values cimport SleepSums
from gpumem._native.pages cimport StorePlace

# The state becomes `after` if it is `before`; returns whether it was. In STATE_CLOSING and
# STATE_FALLING nothing is allocated, while a thread looks for what is in use.
cdef bint arena_turn(ArenaCore* arena, uint32_t before, uint32_t after) noexcept nogil
# Puts an arena in STATE_FALLING that can sleep to sleep, with its graph pools. Caller holds no
# lock, nor the interpreter's. ARENA_OK, too, if it is asleep already. After a refusal they are
# open, or ARENA_HALF_ASLEEP. The bytes are stored at `place`; NULL: they are dropped.
cdef int arena_sleep(ArenaCore* arena, const StorePlace* place) noexcept nogil
cdef int arena_wake(ArenaCore* arena) noexcept nogil
cdef SleepSums sleep_sums(ArenaCore* arena) noexcept nogil
# Releases the host memory that awake arenas have kept for their next sleep; returns the bytes. Of
# one arena and its graph pools: caller holds no lock. NULL: of all but those that a thread changes.
cdef uint64_t arenas_release_kept(const ArenaCore* owner) noexcept nogil
# Frees the copy; no thread uses the arena any more.
cdef void copy_forget(ArenaCore* arena) noexcept nogil

"""What an arena tells: its blocks, what a shrink left, and why a call failed.

Called with the interpreter lock, after every other lock was released.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._budget cimport Budget, Relief
from gpumem._buffer cimport MemoryResource
from gpumem._native.arena cimport ArenaCore

# The counters of this moment as Stats.
cdef object arena_stats(ArenaCore* core)
# Every block, used and free, as BlockInfo in address order.
cdef list block_list(ArenaCore* core)
# Every region that a shrink could not give back, as RetainedRegion.
cdef tuple retained_regions(ArenaCore* core)
# The one place that turns a status into an exception. `asked` and `extra`: bytes that the caller
# wanted, and what their alignment took on top.
cdef int raise_status(MemoryResource arena, ArenaCore* core, uint64_t asked, uint64_t extra,
                      uint32_t slot, int status) except -1


# ---- Who holds an arena's memory, in one pass over a copy of its books: for errors ---------------


# An OutOfMemoryReport of now. Takes the arena's locks, and calls the driver: hold none.
cdef object report_of(MemoryResource resource, ArenaCore* arena, uint64_t asked, uint64_t rounded,
                      uint32_t slot, str reason)


# ---- An arena's budget, where the interpreter is: joining it, and what a refusal calls -----------
#
# Foreign hooks that allocate without the interpreter lock do as `Arena.take` does:
#
#     status = arena_allocate(arena, nbytes, stream, &block)
#     while status == ARENA_OVER_BUDGET and arena_relieve(arena, &relief):
#         status = arena_allocate(arena, nbytes, stream, &block)
#
# with a `Relief` of zeros for each request, and no lock held.


# From here on what the arena holds, or has handed out, is charged. Before its first block.
cdef int join_budget(MemoryResource arena, ArenaCore* core, object budget, object count) except -1
# "reserved" or "in_use".
cdef str count_of(const ArenaCore* core)
# Could a budget leave so little that pages of 2 MiB do not suit it?
cdef uint64_t least_limit(object budget, object count) except? 0

# The budget has refused. Runs callbacks; True: try again. The first waits with the interpreter lock
# and keeps what callbacks raise; the second takes it, and reports that.
cdef bint relieve(ArenaCore* core, Relief* relief, list errors) except -1
cdef bint arena_relieve(ArenaCore* core, Relief* relief) noexcept nogil
# A call of the arena's that the budget refused, again under pressure; raises where it stays so.
cdef int under_pressure(MemoryResource arena, ArenaCore* core,
                        int (*call)(ArenaCore*, uint64_t) noexcept nogil,
                        uint64_t nbytes) except -1
cdef int raise_over_budget(MemoryResource arena, ArenaCore* core, uint64_t asked, uint64_t extra,
                           uint32_t slot, list errors) except -1

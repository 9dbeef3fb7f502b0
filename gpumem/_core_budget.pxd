"""An arena's budget, where the interpreter is: joining it, and what a refusal calls.

Foreign hooks that allocate without the interpreter lock do as `Arena.take` does:

    status = arena_allocate(arena, nbytes, stream, &block)
    while status == ARENA_OVER_BUDGET and arena_relieve(arena, &relief):
        status = arena_allocate(arena, nbytes, stream, &block)

with a `Relief` of zeros for each request, and no lock held.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore
from gpumem._budget cimport Budget, Relief
from gpumem._buffer cimport MemoryResource

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

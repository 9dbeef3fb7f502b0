"""Reports of an arena: its blocks, its memory by state and owner, and why a call failed.

Called with the interpreter lock, after every other lock was released.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._budget cimport Budget, Relief
from gpumem._native.arena cimport AllocatorHook, ArenaCore
from gpumem._native.driver cimport CUstream
from gpumem._resource.arena.settings cimport ArenaBase

cdef class ReportingArena(ArenaBase):
    pass

# Every region that a shrink could not release, as RetainedRegion.
cdef tuple retained_regions(ArenaCore* core)
cdef object sum_of_stats(list parts)
# The one place that turns a status into an exception. `asked` and `extra`: bytes that the caller
# wanted, and what their alignment took on top.
cdef int raise_status(ArenaBase arena, uint64_t asked, uint64_t extra, uint32_t slot,
                      int status) except -1
# Raises for a close of an arena whose blocks, graphs or virtual tensors are in use.
cdef int raise_in_use(ArenaBase arena) except -1


# ---- An arena's budget: joining it, and the callbacks that a refusal calls -----------------------


# From here on the memory that the arena holds, or hands out, is charged. Before its first block.
cdef int join_budget(ArenaBase arena, object budget, object count) except -1
# "reserved" or "in_use".
cdef str count_of(const ArenaCore* core)
# Could a budget leave so little that pages of 2 MiB do not suit it?
cdef uint64_t least_limit(object budget, object count) except? 0

# The budget has refused. Runs callbacks, and keeps what they raise; True: try again.
cdef bint relieve(ArenaCore* core, Relief* relief, list errors) except -1
# A hook's allocation that the budget refused, tried again after callbacks as long as they help. It
# takes the interpreter lock for them, and reports what they raise. No lock is held.
cdef int allocate_under_pressure(AllocatorHook* hook, uint64_t nbytes, CUstream stream,
                                 uint32_t flags, uint64_t* address) noexcept nogil
# Repeats a call that the budget refused, after callbacks; raises if it is refused for good.
cdef int under_pressure(ArenaBase arena,
                        int (*call)(ArenaCore*, uint64_t) noexcept nogil,
                        uint64_t nbytes) except -1
cdef int raise_over_budget(ArenaBase arena, uint64_t asked, uint64_t extra,
                           uint32_t slot, list errors) except -1


# ---- Virtual tensors that give pages back --------------------------------------------------------

# How far one request has come in asking them; zeros at first.
cdef struct Asking:
    uint32_t reliever       # the one whose turn it is
    uint32_t calls

# Memory is out, as the status says. Calls a callback; True: it released rows, try again. What it
# raises goes to sys.unraisablehook. No lock is held; `but`: the tensor that asks, or None.
cdef bint tensors_relieve(ArenaBase arena, int status, uint64_t nbytes, object but,
                          Asking* asking) except -1

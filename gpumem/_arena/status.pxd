"""Figures of an arena, and a refused request: what may make room for it, then its exception.

Figures are plain values, copied under the arena's locks; `reports.py` makes objects of them. The
other functions are called with the interpreter lock, after every other lock was released.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena.arena cimport Arena, Region
from gpumem._budget cimport PressureState
from gpumem._native.arena.api cimport AllocatorHook, ArenaCore, Block
from gpumem._native.backing cimport Mapped
from gpumem._native.driver cimport CUstream

# Progress of one refused request: callbacks of virtual tensors, then those of budgets, and at last
# a garbage collection.
cdef class Pressure:
    cdef uint32_t next              # index of the next virtual tensor
    cdef uint32_t calls             # of virtual tensors
    cdef PressureState budget
    cdef list errors                # of budgets' callbacks
    cdef bint has_collected
    cdef tuple collected            # as `collect_garbage` returns it; None: nothing was collected

# The one place that turns a status into an exception. `asked` and `extra`: bytes of the request,
# and bytes for their alignment in addition. `pressure`: of the request, or None.
cdef int raise_status(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                      int status, Pressure pressure=*) except -1
# Raises for a close of an arena that has live blocks, graphs or virtual tensors.
cdef int raise_in_use(Arena arena) except -1
# Raises for a use of sleeping memory.
cdef int raise_asleep(Arena arena) except -1
# Raises ConfigError for an arena without a debug heap.
cdef int require_heap(Arena arena) except -1

# Tries an allocation with this status again after callbacks, as long as they make room; raises if
# it is refused for good.
cdef int take_under_pressure(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                             Region region, int status, Block* block) except -1
# Repeats a call that the budget refused, after callbacks; raises if it is refused for good.
cdef int under_pressure(Arena arena, int (*call)(ArenaCore*, uint64_t) noexcept nogil,
                        uint64_t nbytes) except -1
# A hook's allocation that the budget refused, tried again after callbacks as long as they make
# room. It acquires the interpreter lock for them, and reports their exceptions. Caller holds no
# lock.
cdef int allocate_under_pressure(AllocatorHook* hook, uint64_t nbytes, CUstream stream,
                                 uint32_t flags, uint64_t* address) noexcept nogil
# A request was refused with this status. Calls a callback of a virtual tensor other than `but`, and
# passes its exception to sys.unraisablehook; then, if a budget refused, a callback of a budget, and
# keeps its exceptions; at last it collects garbage. True: there may be room, so try again. Caller
# holds no lock.
cdef bint make_room(Arena arena, int status, uint64_t nbytes, object but,
                    Pressure pressure) except -1
# One full garbage collection. Returns the bytes that it freed in the arena and its tags, and the
# cycles that held buffers and tensors, as `OutOfMemoryReport.cycles`; or None: the last collection
# freed nothing, and too little time has passed since. Caller holds no lock: finalizers run.
cdef tuple collect_garbage(Arena arena)

# The fields of its own `Stats`, without those of its tags.
cdef dict counters_of(Arena arena)
# The first fields of a `BlockInfo` for each of its own blocks, in address order.
cdef list rows_of(Arena arena)
# Blocks that its debug heap knows: address -> (requested bytes, whether it is live).
cdef dict heap_blocks_of(Arena arena)
# Does the address lie in memory apart of this kind, or of any? Such memory does not sleep.
cdef bint find_apart(Arena arena, int kind, uint64_t address, Mapped* memory) noexcept
cdef bint is_apart_as(Arena arena, int kind, uint64_t address) noexcept
cdef bint is_apart(Arena arena, uint64_t address) noexcept

"""What an arena tells: its blocks, what a shrink left, and why a call failed.

Called with the interpreter lock, after every other lock was released.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore
from gpumem._buffer cimport MemoryResource

# Every block, used and free, as BlockInfo in address order.
cdef list block_list(ArenaCore* core)
# Every region that a shrink could not give back, as RetainedRegion.
cdef tuple kept_regions(ArenaCore* core)
# The one place that turns a status into an exception. `asked` and `extra`: bytes that the caller
# wanted, and what their alignment took on top.
cdef int raise_status(MemoryResource arena, ArenaCore* core, uint64_t asked, uint64_t extra,
                      uint32_t slot, int status) except -1
